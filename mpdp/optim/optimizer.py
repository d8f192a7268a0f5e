"""Optimizer: what every update rule shares: binding to a layout, groups, counts, state for checkpoints.

A rule is applied range by range, in whatever order and cut the reduced gradient arrives. It owns its
moments and counts, and knows neither ranks nor who holds which range. A rule that needs norms of whole
parameters works in two passes: ``prepare`` gives sums of fixed pieces of a range, ``apply`` takes those of
all ranges. Read next: ``plan`` for how groups become ranges, ``sgd``, ``adam``, ``lion`` and ``lamb`` for the
rules, ``kernels/updates.py`` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ..device import device_of, same_device
from ..errors import CheckpointError
from ..kernels import move
from ..kernels.updates import UpdateKernels
from .groups import Group, non_negative
from .held import HeldArray, Ranges
from .plan import Plan

_MOST_GROUPS = 255


class Shared(NamedTuple):
    """What all pieces of one update share.

    Attributes:
        scale: factor on the gradient.
        limit: the scaled gradient's elements are cut to [-limit, limit]; None leaves them.
        when: 0-d int64 array on the device; nothing changes where it is 0. None for always.
        sums: those of all ranges, where the rule needs them.
    """

    scale: Any
    limit: float | None = None
    when: Any = None
    sums: Any = None


class Optimizer:
    """Update flat weights from flat gradients; subclasses state one rule.

    Args:
        lr: learning rate before schedule and groups, 0 or more.
        weight_decay: decay of parameters that no group gives another, 0 or more.
        groups: tried in order for each parameter.

    Attributes:
        slots: names of the arrays that the rule keeps, one number a weight each.
        state: slot -> flat array over the trainable zone; float32, or float64 for float64 weights. Where it was bound
            to some ranges only, a :class:`~mpdp.optim.held.HeldArray` of these.
        updates: int64 NumPy array, how many updates each trainable parameter got.
    """

    slots: tuple[str, ...] = ()
    counted = False  # whether :meth:`numbers` depend on the updates that were done
    needs_sums = False  # whether the rule works in two passes, with :meth:`prepare`
    sums: Any = None  # then the table that :meth:`prepare` writes its rows to

    def __init__(self, lr: float, weight_decay: float = 0.0, groups: Sequence[Group] = ()) -> None:
        self.lr = non_negative("lr", lr)
        self.weight_decay = non_negative("weight_decay", weight_decay)
        self.groups = tuple(groups)
        for group in self.groups:
            if not isinstance(group, Group):
                raise TypeError(
                    f"groups: expected optim.Group objects, got {group!r}; as in optim.Group('*.bias')"
                )
        if len(self.groups) > _MOST_GROUPS:
            raise ValueError(
                f"groups: expected at most {_MOST_GROUPS}, got {len(self.groups)}; use wider patterns"
            )
        self.state: dict[str, Any] = {}
        self.updates = np.zeros(0, dtype=np.int64)
        self._layout: Any = None
        self._weights: Any = None
        self._copy: Any = None
        self._kernels: Any = None
        self._scratch: Any = None
        self._plan: Any = None
        self._decay_column: Any = None  # decay of each block
        self._groups: Any = None  # group of each block, where the kernels want it
        self._owners: Any = None  # parameter of each block, likewise, once it is needed
        self._common: int | None = 0  # the count that all parameters share; None where they differ
        self._names: tuple[str, ...] = ()
        self._factors = (1.0, *(float(group.lr_factor) for group in self.groups))
        self._decays = (
            self.weight_decay,
            *(self.weight_decay if g.weight_decay is None else float(g.weight_decay) for g in self.groups),
        )

    def bind(
        self, layout: Any, weights: Any, kernels: UpdateKernels, copy: Any = None, held: Ranges | None = None
    ) -> None:
        """Attach the rule to the weights it updates, and allocate its state as zeros.

        **Local.** Binding again to the same weights does nothing.

        Args:
            layout: the map from names to ranges; its trainable zone comes first.
            weights: flat floating array over ``layout.size``, or a HeldArray over it; updated in place.
            kernels: the kernels of the weights' device.
            copy: flat array like ``weights`` in 16 bits, which takes the rounded new weights; or None.
            held: ranges of the trainable zone that will be updated here, cut at spans, apart and in order; state is
                kept for these alone. None for the whole zone.

        Raises:
            ValueError: bound to other weights before, or a group's pattern fits no parameter.
        """
        if self._layout is not None:
            if layout is self._layout and weights is self._weights:
                return
            raise ValueError(
                f"{type(self).__name__}: expected weights that it was bound to before, got others; "
                "make one optimizer for each model, or call unbind() first"
            )
        if not isinstance(weights, HeldArray) and weights.shape != (layout.size,):
            raise ValueError(
                f"weights: expected shape ({layout.size},), got {weights.shape}; pass the arena of this layout"
            )
        names = [entry.name for entry in layout.trainable]
        everything = [entry.name for entry in layout.entries]
        for group in self.groups:
            if not any(fnmatchcase(name, group.pattern) for name in everything):
                shown = ", ".join(everything[:5]) + (", ..." if len(everything) > 5 else "")
                raise ValueError(
                    f"groups: expected each pattern to fit a parameter, got {group.pattern!r} which fits "
                    f"none of {len(everything)} ({shown}); correct or remove it"
                )
        dtype = np.promote_types(weights.dtype, np.float32)  # 16-bit moments would underflow
        self._check_dtype(dtype)
        if held is None:
            self.state = {slot: kernels.flat_zeros(layout.trainable_size, dtype) for slot in self.slots}
        else:
            size = sum(stop - start for start, stop in held)
            self.state = {slot: HeldArray(held, kernels.flat_zeros(size, dtype)) for slot in self.slots}
        self.updates = np.zeros(len(names), dtype=np.int64)
        self._common = 0
        self._names = tuple(names)
        self._plan = Plan(layout, [self._group(name) for name in names])
        self._layout, self._weights, self._copy, self._kernels = layout, weights, copy, kernels
        self._groups = kernels.block_numbers(self._plan.group_of_block)
        self._scratch = kernels.update_scratch(dtype)

    def unbind(self) -> None:
        """Forget weights and state, so that the optimizer can be bound to another layout.

        **Local.** To keep the state across layouts take :meth:`state_arrays` before.
        """
        self.state, self.updates, self._common = {}, np.zeros(0, dtype=np.int64), 0
        self._layout = self._weights = self._copy = self._kernels = self._scratch = self._plan = None
        self._groups = self._owners = None
        self._decay_column = None

    @property
    def scratch_bytes(self) -> int:
        """Working memory of the update, beside the state."""
        return int(getattr(self._scratch, "nbytes", 0))

    def prepare(
        self,
        gradient: Any,
        start: int,
        stop: int,
        scale: Any,
        *,
        used: Any = None,
        clip_value: float | None = None,
    ) -> Any:
        """Return the sums that ``apply`` needs of one range; None for most rules, which need none.

        **Local.** Where a rule needs them, this is the first of its two passes over the range: it takes the gradient
        and changes the moments. Each rank does so for the ranges it owns, in any order; the rows of all of them,
        put together by :meth:`rows`, go to :meth:`apply` of any range.

        Args:
            gradient, scale, used, clip_value: as for :meth:`apply`.
            start: first element, a multiple of ``layout.SPAN``.
            stop: end, a multiple of ``layout.SPAN``.

        Returns:
            float64 array on the device, the :meth:`rows` of the range; the next call of an update overwrites it.
        """
        return None

    def prepare_range_captured(
        self,
        gradient: Any,
        start: int,
        stop: int,
        *,
        scale: Any,
        numbers: Any,
        when: Any,
        used: Any = None,
        clip_value: float | None = None,
    ) -> Any:
        """Return what :meth:`prepare` does, fit for a captured graph; see :meth:`apply_captured`. **Local.**"""
        return None

    def rows(self, start: int, stop: int) -> slice:
        """Return the rows of the table of sums that belong to a range; none for a rule that needs no sums. **Local.**

        The table of all ranges has ``rows(0, layout.trainable_size).stop`` rows. It depends on layout and rule alone.

        Args:
            start: first element, a multiple of ``layout.SPAN``.
            stop: end, a multiple of ``layout.SPAN``.
        """
        return slice(0, 0)

    def numbers(self, lr: float, ahead: int = 0) -> np.ndarray:
        """Return the numbers that an update takes: float64 of shape (numbers of the rule, groups).

        **Local.** The same bits as :meth:`apply` works out from ``lr``; the first row is the rate that multiplies the
        step. All parameters must have got the same number of updates (see :attr:`in_step`).

        Args:
            lr: learning rate of the update.
            ahead: updates under way that :meth:`finish_update` has not counted.
        """
        return np.array([[lr * factor for factor in self._factors]])

    @property
    def in_step(self) -> bool:
        """Whether all parameters have got the same number of updates."""
        return self._common is not None

    def prepare_captured(self) -> None:
        """Make what :meth:`apply_captured` reads beside its arguments, before anything is captured. **Local.**"""
        if self._decay_column is None and len(self._decays) > 1:
            self._decay_column = self._kernels.column(np.array(self._decays), self._groups)

    def apply_captured(
        self,
        gradient: Any,
        start: int,
        stop: int,
        *,
        scale: Any,
        numbers: Any,
        when: Any,
        used: Any = None,
        clip_value: float | None = None,
        sums: Any = None,
    ) -> None:
        """Update a range by numbers in device memory, read when the kernels run; gives :meth:`apply`'s bits.

        **Local.** Fit for a captured graph; :meth:`prepare_captured` comes before.

        Args:
            gradient, start, stop: as for :meth:`apply`.
            scale: 0-d float64 array, the factor on the gradient.
            numbers: float64 array on the device, with the contents of :meth:`numbers`.
            when: 0-d int64 array; nothing changes where it is 0.
            used, clip_value, sums: as for :meth:`apply`.
        """
        numbers = numbers.reshape(-1, len(self._factors))
        if sums is None and self.needs_sums:
            self._check_whole(start, stop)
            sums = self.prepare_range_captured(
                gradient,
                start,
                stop,
                scale=scale,
                numbers=numbers,
                when=when,
                used=used,
                clip_value=clip_value,
            )
        shared = Shared(scale, clip_value, when, self._settled(sums))
        for first, last, values, decay in self._captured_pieces(start, stop, numbers, used):
            self._update_captured(gradient[first:last], first, last, shared, values, decay)

    def _captured_pieces(
        self, start: int, stop: int, numbers: Any, used: Any
    ) -> Iterator[tuple[int, int, list[Any], Any]]:
        """Return the pieces of a range, each with its row of every number and its decay: 0-d, or one a block."""
        block = self._layout.BLOCK
        for first, last, group in self._plan.ranges(start, stop, used):
            if group is None:
                of_block = self._groups[first // block : last // block]
                yield (
                    first,
                    last,
                    [row[of_block] for row in numbers],
                    self._decay_column[first // block : last // block],
                )
            else:
                yield (
                    first,
                    last,
                    [row[group : group + 1].reshape(()) for row in numbers],
                    self._decays[group],
                )

    def _update_captured(
        self, gradient: Any, start: int, stop: int, shared: Shared, numbers: list[Any], decay: Any
    ) -> None:
        """Apply the rule to one piece; ``numbers`` has an array a row of :meth:`numbers`, 0-d or one value a block."""
        raise NotImplementedError

    def apply(
        self,
        gradient: Any,
        start: int,
        stop: int,
        *,
        scale: Any,
        lr: float,
        used: Any = None,
        clip_value: float | None = None,
        sums: Any = None,
    ) -> None:
        """Update the weights of one range.

        **Local.** Within an update the caller covers the trainable zone once, in any cut and order,
        then calls :meth:`finish_update`; the cut does not change a bit of the result.

        Args:
            gradient: flat array over the trainable zone: sums over samples.
            start: first element, a multiple of ``layout.BLOCK``.
            stop: end, a multiple of ``layout.BLOCK``.
            scale: factor on the gradient (1 / count, and the clip factor); on a GPU also a 0-d float64 array.
            lr: learning rate of this update, schedule applied; groups multiply it.
            used: boolean NumPy array over the trainable parameters in layout order, or None for
                all. An unused parameter keeps weight, state and count.
            clip_value: elements of ``gradient * scale`` are cut to [-clip_value, clip_value]; None leaves them.
            sums: for a rule that needs them (``needs_sums``), the table of :meth:`prepare` of all ranges. Without it
                the range is the whole zone, and ``prepare`` is called here.
        """
        if self._plan is None:
            raise ValueError(
                f"{type(self).__name__}: expected bind() before apply(), got none; hand the optimizer to a Trainer"
            )
        block = self._layout.BLOCK
        assert start % block == 0 and stop % block == 0, "ranges are cut at blocks"
        same_device("apply", self._weights, gradient)
        scale = float(scale) if isinstance(scale, float | int | np.generic) else scale
        if sums is None and self.needs_sums:
            self._check_whole(start, stop)
            sums = self.prepare(gradient, start, stop, scale, used=used, clip_value=clip_value)
        shared = Shared(scale, clip_value, None, self._settled(sums))
        for first, last, rate, decay in self._pieces(start, stop, used, float(lr)):
            self._update(gradient[first:last], first, last, shared, rate, decay)

    def _pieces(self, start: int, stop: int, used: Any, lr: float) -> Iterator[tuple[int, int, Any, Any]]:
        """Return the pieces of a range, each with its learning rate and its decay: floats, or one a block."""
        block = self._layout.BLOCK
        for first, last, group in self._plan.ranges(start, stop, used):
            if group is None:
                of_block = self._groups[first // block : last // block]
                rate = self._kernels.column(lr * np.array(self._factors), of_block)
                yield first, last, rate, self._kernels.column(np.array(self._decays), of_block)
            else:
                yield first, last, lr * self._factors[group], self._decays[group]

    def _update(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, decay: Any) -> None:
        """Apply the rule to one piece; ``lr`` and ``decay`` are floats, or float64 arrays a block."""
        raise NotImplementedError

    def _settled(self, sums: Any) -> Any:
        """Return what the pieces need of the sums of all ranges."""
        return sums

    def _check_whole(self, start: int, stop: int) -> None:
        if (start, stop) != (0, self._layout.trainable_size):
            raise ValueError(
                f"sums: expected those of all ranges for {type(self).__name__} on a part of the weights, got None; "
                "call prepare() for each range and put the rows together"
            )

    def _working_copy(self, start: int, stop: int) -> Any:
        """Return a range of the weights in 16 bits, or None."""
        return None if self._copy is None else self._copy[start:stop]

    def _column(self, table: np.ndarray, start: int, stop: int) -> Any:
        """Return values given a parameter, in layout order, as a column over the blocks of a range."""
        if self._owners is None:
            self._owners = self._kernels.block_numbers(self._plan.parameter_of_block())
        block = self._layout.BLOCK
        return self._kernels.column(table, self._owners[start // block : stop // block])

    def finish_update(self, used: Any = None) -> None:
        """Count the update for the parameters that were used. **Local.**"""
        if used is None or used.all():
            self.updates += 1
            if self._common is not None:
                self._common += 1
        else:
            self.updates[used] += 1
            self._common = _shared(self.updates)

    def describe(self) -> dict[str, Any]:
        """Return class, hyper-parameters and groups in a form that JSON can hold.

        **Local.** Ranks compare it at the start, and the checkpoint stores it.
        """
        return {
            "class": type(self).__name__,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            **self._hyper_parameters(),
            "groups": [asdict(group) for group in self.groups],
        }

    def __repr__(self) -> str:
        arguments = {k: v for k, v in self.describe().items() if k not in ("class", "groups")}
        text = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return f"{type(self).__name__}({text}{', groups=...' if self.groups else ''})"

    def state_arrays(self) -> dict[str, Any]:
        """Return what a checkpoint holds: each slot's array (not a copy), and ``updates``.

        **Local.** Where the optimizer keeps the state of some ranges, the arrays are these one behind the other.
        """
        slots = {name: _memory(flat) for name, flat in self.state.items()}
        return {**slots, "updates": self.updates}

    def load_state_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Copy a checkpoint's arrays into the state of a bound optimizer.

        **Local.** Nothing is changed unless everything fits.

        Args:
            arrays: as :meth:`state_arrays` gives them.

        Raises:
            CheckpointError: naming every missing, unexpected or mismatched array.
        """
        own = self.state_arrays()
        faults = [f"{name} is missing" for name in own if name not in arrays]
        faults += [f"{name} is unexpected" for name in arrays if name not in own]
        for name, array in own.items():
            got = arrays.get(name)
            if got is not None and (got.shape != array.shape or got.dtype != array.dtype):
                faults.append(f"{name} is {got.dtype} {got.shape} in place of {array.dtype} {array.shape}")
        if faults:
            raise CheckpointError(
                f"optimizer state: expected {type(self).__name__}'s arrays {sorted(own)}, got: "
                f"{'; '.join(faults)}; resume with the optimizer and model that wrote the checkpoint"
            )
        for name, array in own.items():
            array[...] = move(arrays[name], device_of(array))
        self._common = _shared(self.updates)

    def recount(self) -> None:
        """Take note that ``updates`` was overwritten in place. **Local.**"""
        self._common = _shared(self.updates)

    def _hyper_parameters(self) -> dict[str, Any]:
        return {}

    def _check_dtype(self, dtype: Any) -> None:
        """Raise ValueError if a hyper-parameter cannot be held by the state's dtype."""

    def _group(self, name: str) -> int:
        """Return the number of the group a parameter takes: 0 for none."""
        for number, group in enumerate(self.groups, start=1):
            if fnmatchcase(name, group.pattern):
                return number
        return 0


def _memory(flat: Any) -> Any:
    """Return the array behind a slot."""
    return flat.array if isinstance(flat, HeldArray) else flat


def _shared(updates: np.ndarray) -> int | None:
    """Return the count that all parameters share, or None."""
    if len(updates) == 0:
        return 0
    first = int(updates[0])
    return first if (updates == first).all() else None
