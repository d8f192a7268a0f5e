"""An update of a replica, from the reduced gradient to new weights, wherever these are done.

With ``replicated`` every rank has the whole gradient and asks nobody. With other placements a rank has the sums of its
own ranges: what depends on all of them is brought together first, with the same bits as if one rank had them all.
Read ``placement`` for who has what, ``data_parallel`` and ``capture`` for the use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..optim import LossScale, Optimizer
from . import non_finite
from .record import Kind, exchange

if TYPE_CHECKING:
    from .replica import Replica


def to_be_applied(replica: Replica, loss_scale: LossScale | None, step: int) -> bool:
    """Return whether to apply the reduced gradient, and go on to the next loss scale; all ranks decide alike.

    **Collective** where ranks have parts of the gradient.

    Args:
        replica: whose gradient.
        loss_scale: None where the loss is not scaled.
        step: finished updates.

    Raises:
        NonFiniteError: on all ranks: the gradient is NaN or infinite, and no loss scale can fall.
    """
    finite = _all_finite(replica, step)
    if not finite and (loss_scale is None or loss_scale.at_bottom):
        smallest = None if loss_scale is None else loss_scale.smallest
        non_finite.raise_gradient(replica.layout, _first_bad(replica), step, smallest)
    if loss_scale is not None:
        loss_scale.update(finite)
    return finite


def _all_finite(replica: Replica, step: int) -> bool:
    held, gradient, kernels = replica.placement.held, replica.arena.array, replica.kernels
    if held is None:
        return bool(kernels.all_finite(gradient))
    finite = all(bool(kernels.all_finite(gradient[start:stop])) for start, stop in held)
    layout = replica.layout.digest
    return not exchange(replica.comm, Kind.UPDATE, step, sums=(not finite,), layout=layout).sums[0]


def _first_bad(replica: Replica) -> int:
    """Return the first element of the reduced gradient that is not finite, -1 if there is none."""
    held, gradient, layout = replica.placement.held, replica.arena.array, replica.layout
    found = layout.size
    for start, stop in ((0, layout.trainable_size),) if held is None else held:
        part = replica.kernels.to_numpy(gradient[start:stop]).astype(np.float64, copy=False)
        bad = np.flatnonzero(~np.isfinite(part))
        if len(bad):
            found = start + int(bad[0])
            break
    if held is not None:
        found = -replica.comm.reduce_numbers([-found], [])[0][0]
    return found if found < layout.size else -1


def squared_norm(replica: Replica) -> float:
    """Return the squared norm of the reduced gradient, the same bits on every rank and for every placement.

    **Collective** where ranks have parts of it: they bring the sums of their spans, which are added in order.
    """
    held, gradient, span = replica.placement.held, replica.arena.array, replica.layout.SPAN
    if held is None:
        return float(replica.kernels.squared_norm(gradient, span))
    sums = replica.kernels.flat_zeros(replica.layout.trainable_size // span, np.float64)
    for start, stop in held:
        sums[start // span : stop // span] = replica.kernels.sum_of_squares(gradient[start:stop], span)
    replica.comm.all_reduce(sums, lane="urgent")
    return float(replica.kernels.total(sums))


def sums_of(replica: Replica, optimizer: Optimizer, prepare: Callable[[int, int], Any]) -> Any:
    """Return the sums of all ranges that a rule needs, where ranks have parts; None where ``apply`` sees to them.

    **Collective** where ranks have parts: each brings the rows of its own, and zeros change no bit of the others'. It
    can be captured.

    Args:
        replica: what is updated.
        optimizer: the rule.
        prepare: ``prepare(start, stop)`` writes the rows of a range.
    """
    if replica.placement.held is None or not optimizer.needs_sums:
        return None
    table = optimizer.sums
    table.fill(0)
    for start, stop in replica.placement.held:
        prepare(start, stop)
    replica.comm.all_reduce(table.reshape(-1), lane="urgent")
    return table


def update(replica: Replica, apply: Callable[[int, int], None], *, late: bool = False) -> None:
    """Apply an update where it is done, and give every rank the new weights.

    **Collective** where ranks hold parts. It can be captured unless ``late``.

    Args:
        replica: what is updated.
        apply: ``apply(start, stop)`` updates a range of the weights, and of the working copies.
        late: return while the weights are still under way, where the transport carries them by itself.
    """
    replica.arrive()  # owners write again what they have given
    if late and replica.can_give_late:
        update_own(replica, apply)
        replica.give_late()
        return
    replica.placement.update(replica.given, apply)
    if replica.masters is not None:
        replica.masters.share()
    elif replica.placement.held == () and replica.copies is not None:
        replica.kernels.store(replica.weights, replica.copies)  # what has come are the masters


def update_own(replica: Replica, apply: Callable[[int, int], None]) -> None:
    """Apply an update to the slices of this rank, of which ``replica.give_late`` gives the new weights.

    **Collective.** It can be captured.

    Args:
        replica, apply: as for :func:`update`.
    """
    assert replica.placement.held is not None
    for start, stop in replica.placement.held:
        apply(start, stop)
    if replica.masters is not None:
        replica.masters.share()


def show(replica: Replica) -> None:
    """Let forward read weights that something else than an optimizer has written, on every rank that has them.

    **Collective** where ranks hold parts of them, else **Local.**
    """
    replica.binding.stale, replica.binding.averaged = True, False
    if replica.masters is not None:
        weights, copies = replica.weights, replica.copies
        update(replica, lambda start, stop: replica.kernels.store(weights[start:stop], copies[start:stop]))
