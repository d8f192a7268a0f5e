"""Moving a tensor to another device: the one operation whose result lies elsewhere than its input."""

from __future__ import annotations

from typing import Any

from ... import kernels
from ...device import Device, device_of
from ..operation import Operation
from ..tensor import Tensor, unwrap


def _to(k, x, device):
    return kernels.move(x, device), device_of(x)


def _to_backward(k, source, g, wants, device):
    return (kernels.move(g, source),)


_apply_to = Operation("to", _to, _to_backward)


def to(x: Any, device: Device) -> Tensor:
    """Return x on ``device``, itself where it is there already; a gradient is moved back. **Local.**

    A copy waits until it is done.
    """
    if isinstance(x, Tensor) and device_of(unwrap(x)) == device:
        return x
    return _apply_to(x, device=device)
