"""Normalisation by channel: batch norm and group norm.

Statistics of a batch that several replicas share are merged by ``peers``, which whoever knows the replicas hands in;
this module knows what is exchanged and not with whom. Shapes: N samples, C channels, ``...`` any number of axes.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from ... import kernels
from ...kernels.precision import wide
from ..operation import Operation
from ..recompute import recomputing
from ..samples import drawn
from ..tensor import Tensor, unwrap
from ..wants import WANTED, Pair
from .normalisation import layer_norm
from .shapes import reshape


class Peers(Protocol):
    """Replicas that run the same operation at the same time, each on its part of a batch."""

    def gather(self, numbers: Any, what: str) -> Any:
        """Return the float64 arrays (M,) that all replicas pass, as rows (replicas, M) in a fixed order.

        **Collective.** ``what`` is compared: it says who is asking.
        """

    def add(self, numbers: Any, what: str) -> Any:
        """Return the sum over replicas of float64 arrays of one length. **Collective.**"""


def _batch_norm(k, x, weight, bias, residual, eps, peers, what, running, momentum, relu):
    gather = None if peers is None else lambda numbers: peers.gather(numbers, f"{what} forward")
    # A part of forward that is computed again takes the statistics of the first time: peers run it when they like.
    count, mean, rstd = drawn(
        lambda: k.channel_statistics(x, eps, gather, None if recomputing() else running, momentum)
    )
    out, saved = k.normalise_channels(x, mean, rstd, weight, bias, residual, relu)
    return out, (saved, weight, bias, count)


def _batch_norm_backward(k, saved, g, wants, eps, peers, what, running, momentum, relu):
    saved, weight, bias, count = saved
    gain, shift = _into(k, wants[1], weight), _into(k, wants[2], bias)
    # The parameters' gradients are this part's: they are added up like all others.
    g, other = g if type(g) is Pair else (g, None)
    sums, g = k.channel_sums(g, saved, gain, shift, other)
    if peers is not None:
        # Also where nobody here wants it: another replica may, and all take part.
        sums = peers.add(sums.reshape(-1), f"{what} backward").reshape(sums.shape)
    x = None if wants[0] is None else k.normalise_channels_backward(g, saved, sums, count)
    return x, _written(wants[1], gain), _written(wants[2], shift), None if wants[3] is None else g


def _into(k, want, like):
    """Return where a parameter's gradient goes, and what the old contents count."""
    if want is None:
        return None
    return (k.xp.empty(like.shape, like.dtype), 0.0) if want is WANTED else (want.array, want.beta)


def _written(want, pair):
    return want if pair is None or want is not WANTED else pair[0]


def _scale_channels(k, x, weight, bias, residual, mean, rstd, relu):
    out, saved = k.normalise_channels(x, mean, rstd, weight, bias, residual, relu)
    return out, (saved, weight, bias)


def _scale_channels_backward(k, saved, g, wants, mean, rstd, relu):
    saved, weight, bias = saved
    gain, shift = _into(k, wants[1], weight), _into(k, wants[2], bias)
    _, g = k.channel_sums(g, saved, gain, shift)
    x = None if wants[0] is None else k.normalise_channels_backward(g, saved)
    return x, _written(wants[1], gain), _written(wants[2], shift), None if wants[3] is None else g


_apply_batch_norm = Operation(
    "batch_norm", _batch_norm, _batch_norm_backward, wide=(1, 2), pairs=True, floats=1
)
_apply_scale_channels = Operation(
    "scale_channels", _scale_channels, _scale_channels_backward, wide=(1, 2), floats=1
)


def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-5,
    relu: bool = False,
    peers: Peers | None = None,
    what: str = "batch_norm",
    running: tuple[Any, Any] | None = None,
    momentum: float = 0.1,
) -> Tensor:
    """Normalise each channel over the samples and places of the batch, then scale and shift it.

    ``(x - mean) / sqrt(variance + eps) * weight + bias`` with the biased variance, both taken over every axis but the
    second. **Local** without ``peers``; else **Collective**, forward and backward, also on a part without samples,
    and the batch is that of all replicas.

    Args:
        x: (N, C, ...).
        weight, bias: (C,), or None.
        residual: added to the result, of the shape of x; or None. One pass does it all.
        eps: added to the variance.
        relu: take max(., 0) of that as well.
        peers: the replicas that hold the other parts of the batch.
        what: names the caller to the peers.
        running: arrays (C,) of the mean and the unbiased variance, which this call moves by ``momentum`` towards those
            of the batch. A batch of one value a channel leaves the variance alone, and one with NaN both.
        momentum: weight of this batch in them.

    Raises:
        ValueError: x without a channel axis, or a residual of another shape.

    Source: Ioffe, Szegedy, "Batch normalization" (2015), algorithm 1.
    """
    _check_channels("batch_norm", x, weight, bias, residual)
    return _apply_batch_norm(
        x,
        weight,
        bias,
        residual,
        eps=float(eps),
        peers=peers,
        what=what,
        running=running,
        momentum=float(momentum),
        relu=bool(relu),
    )


def scale_channels(
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    relu: bool = False,
) -> Tensor:
    """Return (x - mean) * rstd * weight + bias, channel by channel, with statistics that are given. **Local.**

    Args:
        x: (N, C, ...).
        mean, rstd: arrays (C,), which get no gradient.
        weight, bias: (C,), or None.
        residual: added to the result, of the shape of x; or None.
        relu: take max(., 0) of that as well.

    Raises:
        ValueError: x without a channel axis, or numbers that do not fit the channels.
    """
    _check_channels("scale_channels", x, weight, bias, residual)
    return _apply_scale_channels(
        x, weight, bias, residual, mean=unwrap(mean), rstd=unwrap(rstd), relu=bool(relu)
    )


def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """Normalise each group of channels of each sample to mean 0 and variance 1, then scale and shift channels.

    **Local.**

    Args:
        x: (N, C, ...).
        groups: parts into which the channels are cut.
        weight, bias: (C,), or None.
        eps: added to the variance.

    Raises:
        ValueError: groups that do not divide the channels.

    Source: Wu, He, "Group normalization" (2018), equations 1 to 3.
    """
    _check_channels("group_norm", x, weight, bias)
    shape = unwrap(x).shape
    n, channels = shape[:2]
    if isinstance(groups, bool) or not hasattr(groups, "__index__") or groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: expected groups that divide the {channels} channels, got {groups!r}; 1 is one group"
        )
    size = channels // groups * math.prod(shape[2:])
    out = reshape(layer_norm(reshape(x, (n, groups, size)), shape=(size,), eps=eps), shape)
    if weight is None and bias is None:
        return out
    xp, dtype = kernels.of(unwrap(x)).xp, wide(unwrap(x).dtype)
    return scale_channels(out, xp.zeros(channels, dtype), xp.ones(channels, dtype), weight, bias)


def _check_channels(name: str, x: Any, weight: Any, bias: Any, residual: Any = None) -> None:
    shape = unwrap(x).shape
    if len(shape) < 2:
        raise ValueError(
            f"{name}: expected x of shape (samples, channels, ...), got {shape}; add a sample axis"
        )
    for what, value in (("weight", weight), ("bias", bias)):
        if value is not None and unwrap(value).shape != shape[1:2]:
            raise ValueError(
                f"{name}: expected a {what} of shape {shape[1:2]}, got {unwrap(value).shape}; one number a channel "
                f"of x, whose shape is {shape}"
            )
    if residual is not None and unwrap(residual).shape != shape:
        raise ValueError(
            f"{name}: expected a residual of x's shape {shape}, got {unwrap(residual).shape}; it is added as it is"
        )
