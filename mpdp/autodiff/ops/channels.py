"""Normalisation by channel: batch norm and group norm.

Statistics of a batch that several replicas share are merged by ``peers``, which whoever knows the replicas hands in;
this module knows what is exchanged and not with whom. Shapes: N samples, C channels, ``...`` any number of axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ... import kernels
from ...kernels.precision import wide
from ..operation import Operation
from ..recompute import recomputing
from ..samples import drawn
from ..tensor import Tensor, unwrap
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


def _merged(k: Any, rows: Any, channels: int) -> tuple[Any, Any, Any]:
    """Return (count, mean, squares) of a batch from those of its parts, added in order.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
    equation 2.1. An empty part changes nothing.
    """
    xp = k.xp
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = counts.sum(axis=0)
    weights = counts / xp.maximum(total, 1)
    mean = xp.zeros(channels, np.float64)
    for i in range(len(rows)):
        mean += weights[i] * means[i]
    square = xp.zeros(channels, np.float64)
    for i in range(len(rows)):
        away = means[i] - mean
        square += squares[i] + counts[i] * away * away
    return total[0], mean, square


def _batch_norm(k, x, weight, bias, eps, peers, what, observe):
    xp, shape = k.xp, x.shape
    rows = x.reshape(shape[0], shape[1], math.prod(shape[2:]))
    # A part of forward that is computed again takes the statistics of the first time: peers run it when they like.
    count, mean, squares = drawn(lambda: _statistics(k, rows, peers, what, observe))
    rstd = 1 / xp.sqrt(squares / xp.maximum(count, 1) + eps)
    out, normal = k.normalise_channels(rows, mean, rstd, weight, bias)
    return out.reshape(shape), (normal, rstd, weight, None if bias is None else bias.dtype, count, shape)


def _statistics(k, rows, peers, what, observe):
    """Return count, mean and squares of the whole batch, and show them to who observes."""
    xp, channels = k.xp, rows.shape[1]
    mean, squares = k.channel_moments(rows)
    count: Any = rows.shape[0] * rows.shape[2]
    if peers is not None:
        own = xp.empty(1 + 2 * channels, np.float64)
        own[0] = count
        own[1 : 1 + channels] = mean
        own[1 + channels :] = squares
        count, mean, squares = _merged(k, peers.gather(own, f"{what} forward"), channels)
    else:
        count = xp.full((), count, np.float64)
    if observe is not None and not recomputing():
        observe(count, mean, squares)
    return count, mean, squares


def _batch_norm_backward(k, saved, g, wants, eps, peers, what, observe):
    normal, rstd, weight, bias_dtype, count, shape = saved
    g = g.reshape(normal.shape)
    sums = k.channel_sums(g, normal)
    # The parameters' gradients are this part's: they are added up like all others.
    gradients = [
        None,
        None if wants[1] is None else sums[1].astype(weight.dtype),
        None if wants[2] is None else sums[0].astype(bias_dtype),
    ]
    if peers is not None:
        # Also where nobody here wants it: another replica may, and all take part.
        sums = peers.add(sums.reshape(-1), f"{what} backward").reshape(sums.shape)
    if wants[0] is not None:
        sums = sums / k.xp.maximum(count, 1)
        scale = rstd if weight is None else rstd * weight
        out = k.normalise_channels_backward(g, normal, scale, sums[0], sums[1])
        gradients[0] = out.reshape(shape)
    return tuple(gradients)


def _scale_channels(k, x, weight, bias, mean, rstd):
    rows = x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    out, normal = k.normalise_channels(rows, mean, rstd, weight, bias)
    return out.reshape(x.shape), (normal, rstd, weight, None if bias is None else bias.dtype)


def _scale_channels_backward(k, saved, g, wants, mean, rstd):
    normal, rstd, weight, bias_dtype = saved
    rows = g.reshape(normal.shape)
    x = gain = shift = None
    if wants[1] is not None or wants[2] is not None:
        sums = k.channel_sums(rows, normal)
        gain = None if wants[1] is None else sums[1].astype(weight.dtype)
        shift = None if wants[2] is None else sums[0].astype(bias_dtype)
    if wants[0] is not None:
        scale = (rstd if weight is None else rstd * weight).astype(wide(g.dtype), copy=False)
        x = (rows * scale[:, None]).astype(g.dtype, copy=False).reshape(g.shape)
    return x, gain, shift


_apply_batch_norm = Operation("batch_norm", _batch_norm, _batch_norm_backward, wide=(1, 2))
_apply_scale_channels = Operation("scale_channels", _scale_channels, _scale_channels_backward, wide=(1, 2))


def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    peers: Peers | None = None,
    what: str = "batch_norm",
    observe: Callable[[Any, Any, Any], None] | None = None,
) -> Tensor:
    """Normalise each channel over the samples and places of the batch, then scale and shift it.

    ``(x - mean) / sqrt(variance + eps) * weight + bias`` with the biased variance, both taken over every axis but the
    second. **Local** without ``peers``; else **Collective**, forward and backward, also on a part without samples,
    and the batch is that of all replicas.

    Args:
        x: (N, C, ...).
        weight, bias: (C,), or None.
        eps: added to the variance.
        peers: the replicas that hold the other parts of the batch.
        what: names the caller to the peers.
        observe: called with the count of the whole batch (0-d), the mean, and the sum of squared differences from it
            (C,), in float64.

    Raises:
        ValueError: x without a channel axis.

    Source: Ioffe, Szegedy, "Batch normalization" (2015), algorithm 1.
    """
    _check_channels("batch_norm", x, weight, bias)
    return _apply_batch_norm(x, weight, bias, eps=float(eps), peers=peers, what=what, observe=observe)


def scale_channels(x: Any, mean: Any, rstd: Any, weight: Any = None, bias: Any = None) -> Tensor:
    """Return (x - mean) * rstd * weight + bias, channel by channel, with statistics that are given. **Local.**

    Args:
        x: (N, C, ...).
        mean, rstd: arrays (C,), which get no gradient.
        weight, bias: (C,), or None.

    Raises:
        ValueError: x without a channel axis, or numbers that do not fit the channels.
    """
    _check_channels("scale_channels", x, weight, bias)
    return _apply_scale_channels(x, weight, bias, mean=unwrap(mean), rstd=unwrap(rstd))


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


def _check_channels(name: str, x: Any, weight: Any, bias: Any) -> None:
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
