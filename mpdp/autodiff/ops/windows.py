"""Convolution and pooling of images (N, C, H, W).

Shapes: N samples, C channels in, O out, H x W pixels in, P x Q out, I x J the window.
"""

from __future__ import annotations

from typing import Any

from ...kernels.windows import Windows
from ..operation import Operation
from ..tensor import Tensor, unwrap
from ..wants import WANTED, Target

Pair = int | tuple[int, int]
ENGINES = ("auto", "cudnn", "plain")


def _conv2d(k, x, weight, bias, windows, groups, relu, engine):
    out = k.conv2d(x, weight, bias, windows, groups, relu, engine)
    return out, (x, weight, out if relu else None)


def _conv2d_backward(k, saved, g, wants, windows, groups, relu, engine):
    x, weight, out = saved
    wanted = tuple(want is not None for want in wants)
    into = tuple((want.array, want.beta) if isinstance(want, Target) else None for want in wants[1:])
    gx, *rest = k.conv2d_backward(g, x, weight, out, windows, groups, wanted, into, engine)
    return gx, *(_handed(k, want, gradient, weight.dtype) for want, gradient in zip(wants[1:], rest))


def _handed(k, want, gradient, dtype):
    """Hand over a gradient that may be wider than its input: memory of a leaf takes it unrounded."""
    if want is None or want is WANTED:
        return None if gradient is None else gradient.astype(dtype, copy=False)
    if gradient is not want.array:
        k.store(gradient, want.array, want.beta)
    return want


def _max_pool2d(k, x, windows, relu):
    return k.max_pool2d(x, windows, relu)


def _max_pool2d_backward(k, saved, g, wants, windows, relu):
    return (k.max_pool2d_backward(g, saved, windows, relu),)


def _avg_pool2d(k, x, windows):
    return k.avg_pool2d(x, windows), x.shape


def _avg_pool2d_backward(k, shape, g, wants, windows):
    return (k.avg_pool2d_backward(g, shape, windows),)


def _global_avg_pool2d(k, x):
    return k.global_avg_pool2d(x), x.shape


def _global_avg_pool2d_backward(k, shape, g, wants):
    return (k.global_avg_pool2d_backward(g, shape),)


_apply_conv2d = Operation("conv2d", _conv2d, _conv2d_backward, floats=1)
_apply_max_pool2d = Operation("max_pool2d", _max_pool2d, _max_pool2d_backward)
_apply_avg_pool2d = Operation("avg_pool2d", _avg_pool2d, _avg_pool2d_backward, floats=1)
_apply_global_avg_pool2d = Operation(
    "global_avg_pool2d", _global_avg_pool2d, _global_avg_pool2d_backward, floats=1
)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    relu: bool = False,
    engine: str = "auto",
) -> Tensor:
    """Return the cross-correlation of images with a weight, as layers of that name compute it. **Local.**

    ``out[n, o, p, q] = bias[o] + sum over c, i, j of weight[o, c, i, j] * x[n, c, p * stride + i * dilation - padding,
    q * stride + j * dilation - padding]``, where channels of x are those of o's group, and pixels outside are 0.

    Args:
        x: (N, C, H, W).
        weight: (O, C / groups, I, J).
        bias: (O,), or None.
        stride, padding, dilation: pixels, an integer or a pair (down, across).
        groups: parts into which both C and O are cut; a part of O sees its part of C alone.
        relu: take max(out, 0) as well, which saves a pass.
        engine: ``"plain"``: matrix products; ``"cudnn"``: cuDNN's plans, on a GPU with ``nvidia-cudnn-frontend``, in 16
            bits or float32; ``"auto"``: cuDNN for what it has, and the log says once what it has not.

    Returns:
        (N, O, P, Q) with P = (H + 2 padding - dilation (I - 1) - 1) // stride + 1, and Q likewise.

    Raises:
        ValueError: shapes that do not fit, an image smaller than the window, or an engine that can't do it.
        MissingDependencyError: ``engine="cudnn"`` without ``nvidia-cudnn-frontend``.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}; choose one")
    shape, kernel = unwrap(x).shape, unwrap(weight).shape
    if len(kernel) != 4 or 0 in kernel[2:]:
        raise ValueError(
            f"conv2d: expected a weight of shape (outputs, channels / groups, height, width), got {kernel}; "
            "give a window of one pixel or more"
        )
    windows = _windows("conv2d", kernel[2:], stride, padding, dilation)
    if not _is_whole(groups) or groups < 1 or kernel[0] % groups:
        raise ValueError(
            f"conv2d: expected groups that divide the {kernel[0]} outputs, got {groups!r}; 1 is no groups"
        )
    if len(shape) != 4 or shape[1] != kernel[1] * groups:
        raise ValueError(
            f"conv2d: expected x of shape (samples, {kernel[1] * groups}, height, width) for a weight of shape "
            f"{kernel} in {groups} groups, got {shape}; channels come before pixels"
        )
    if bias is not None and unwrap(bias).shape != kernel[:1]:
        raise ValueError(
            f"conv2d: expected a bias of shape {kernel[:1]}, got {unwrap(bias).shape}; one number an output"
        )
    _check_fit("conv2d", shape, windows)
    return _apply_conv2d(x, weight, bias, windows=windows, groups=int(groups), relu=bool(relu), engine=engine)


def max_pool2d(
    x: Any, size: Pair, *, stride: Pair | None = None, padding: Pair = 0, relu: bool = False
) -> Tensor:
    """Return the maximum of each window of an image. **Local.**

    The first of equal maxima, row by row, takes the gradient. Pixels outside the image never win.

    Args:
        x: (N, C, H, W).
        size: of the window, an integer or a pair (down, across).
        stride: pixels between windows; left out, the size.
        padding: pixels around the image, at most half the size.
        relu: take max(out, 0) as well, which is the same as before the pooling, and less work.

    Raises:
        ValueError: sizes that do not fit.
    """
    windows = _pooling("max_pool2d", x, size, stride, padding)
    return _apply_max_pool2d(x, windows=windows, relu=bool(relu))


def avg_pool2d(x: Any, size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the mean of each window of an image. **Local.**

    Args:
        x: (N, C, H, W).
        size: of the window, an integer or a pair (down, across).
        stride: pixels between windows; left out, the size.
        padding: pixels around the image, at most half the size; they are 0 and count.

    Raises:
        ValueError: sizes that do not fit.
    """
    return _apply_avg_pool2d(x, windows=_pooling("avg_pool2d", x, size, stride, padding))


def global_avg_pool2d(x: Any) -> Tensor:
    """Return the mean of each channel over all pixels: (N, C, H, W) to (N, C). **Local.**

    Raises:
        ValueError: x without two axes of pixels.
    """
    shape = tuple(unwrap(x).shape)
    if len(shape) != 4:
        raise ValueError(f"x: expected shape (samples, channels, height, width), got {shape}; reshape it")
    return _apply_global_avg_pool2d(x)


def pair(what: str, value: Any, least: int) -> tuple[int, int]:
    """Return a pair (down, across) of an integer or a pair, after checking it. **Local.**"""
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2 or not all(_is_whole(number) and number >= least for number in both):
        raise ValueError(
            f"{what}: expected an integer of {least} or more, or a pair of them (down, across), got {value!r}; "
            "count pixels"
        )
    return int(both[0]), int(both[1])


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _windows(name: str, size: Any, stride: Any, padding: Any, dilation: Any) -> Windows:
    return Windows(
        pair(f"{name}: size", size, 1),
        pair(f"{name}: stride", stride, 1),
        pair(f"{name}: padding", padding, 0),
        pair(f"{name}: dilation", dilation, 1),
    )


def _pooling(name: str, x: Any, size: Any, stride: Any, padding: Any) -> Windows:
    windows = _windows(name, size, size if stride is None else stride, padding, 1)
    if any(2 * pad > length for pad, length in zip(windows.padding, windows.size)):
        raise ValueError(
            f"{name}: expected a padding of at most half the window {windows.size}, got {windows.padding}; "
            "a window must hold a pixel"
        )
    shape = unwrap(x).shape
    if len(shape) != 4:
        raise ValueError(
            f"{name}: expected x of shape (samples, channels, height, width), got {shape}; reshape it"
        )
    _check_fit(name, shape, windows)
    return windows


def _check_fit(name: str, shape: tuple[int, ...], windows: Windows) -> None:
    if min(windows.fit(*shape[2:])) < 1:
        raise ValueError(
            f"{name}: expected an image of at least one window {windows.size} (dilation {windows.dilation}, padding "
            f"{windows.padding}), got {shape[2:]} pixels; use smaller windows, fewer poolings or larger images"
        )
