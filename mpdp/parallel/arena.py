"""Arenas: flat buffers over a layout that parameters and gradients are views of.

Memory that crosses ranks is allocated by the communicator, so that a transport may map it or register it.
Views never move while a layout lives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..device import CPU, Device, as_device
from ..world import current_world
from .layout import Layout


class Arena:
    """A flat array over the whole index space of a layout, or over its trainable zone.

    **Collective.** Every rank allocates the same size.
    """

    def __init__(
        self, layout: Layout, dtype: Any, device: Device, comm: Communicator, *, trainable_only: bool = False
    ) -> None:
        self.layout = layout
        self.device = device
        self.dtype = np.dtype(dtype)
        count = layout.trainable_size if trainable_only else layout.size
        self.buffer = comm.allocate(count * self.dtype.itemsize, device)
        self.array = self.buffer.array(self.dtype, count)

    def __getitem__(self, name: str) -> Any:
        if self.layout[name].stop > len(self.array):
            raise ValueError(
                f"name: expected a trainable parameter, got the frozen {name!r}; it has no gradient"
            )
        return self.layout.view(self.array, name)


class GradientArena(Arena):
    """Hold the gradients of hand-written models, in one buffer that ranks reduce in place.

    **Collective.** The views are writable and never move, also across :meth:`Reducer.finish`.

    Args:
        shapes: name to shape, in the order in which the forward pass uses the parameters; equal on all ranks.
        dtype: ``"float32"``, ``"float64"`` or ``"float16"``.
        device: a :class:`Device` or its name.
        comm: the ranks that share the gradients (default: the current world's axis ``"data"``).

    Attributes:
        array: the flat buffer; padding between parameters holds zeros.
        layout: the map from names to ranges.

    Raises:
        ValueError: no shapes, or a dtype that is not a float.

    Example:
        >>> import mpdp
        >>> arena = mpdp.GradientArena({"w": (3, 2), "b": (3,)}, "float32", "cpu")
        >>> arena["w"][...] = 1.0
        >>> arena["w"].shape
        (3, 2)
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Any = "float32",
        device: Device | str = CPU,
        comm: Communicator | None = None,
        *,
        frozen: Collection[str] = (),
    ) -> None:
        if not shapes:
            raise ValueError("shapes: expected at least one parameter, got none; there is nothing to train")
        if np.dtype(dtype).name not in ("float16", "float32", "float64"):
            raise ValueError(
                f"dtype: expected float16, float32 or float64, got {np.dtype(dtype).name}; "
                "gradients are floats"
            )
        self.comm = comm if comm is not None else current_world().axis("data")
        super().__init__(Layout(shapes, frozen), dtype, as_device(device), self.comm, trainable_only=True)

    @classmethod
    def over(cls, layout: Layout, dtype: Any, device: Device, comm: Communicator) -> GradientArena:
        """Return an arena over a layout that exists already. **Collective.**"""
        arena = cls.__new__(cls)
        arena.comm = comm
        Arena.__init__(arena, layout, dtype, device, comm, trainable_only=True)
        return arena

    def __contains__(self, name: object) -> bool:
        return name in self.layout
