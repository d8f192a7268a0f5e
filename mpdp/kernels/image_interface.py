"""The part of the kernels' interface for images and channels; ``base`` holds the rest and the conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .rules import RuleKernels

if TYPE_CHECKING:
    from .channels import Statistics
    from .windows import Windows

Array = Any  # a NumPy or CuPy array
Shape = tuple[int, ...]
# (out, beta) of each of two results, or None
Into = tuple[tuple[Array, float] | None, tuple[Array, float] | None]


class ImageKernels(RuleKernels):
    """Convolution, pooling and batch norm on the arrays of one device. **Local.**"""

    # -- channels: x, g and what is made of them are (N, C, ...), what belongs to a channel is (C,) ----------

    def channel_moments(self, x: Array) -> Array:
        """Return, in float64 and one array (1 + 2 C,): how many numbers a channel has, the mean of each channel, and
        its sum of squared differences from that mean. Both are 0 where there is nothing to average.
        """  # fmt: skip
        raise NotImplementedError

    def channel_statistics(
        self,
        x: Array,
        eps: float,
        gather: Callable[[Array], Array] | None = None,
        running: tuple[Array, Array] | None = None,
        momentum: float = 0.0,
    ) -> Statistics:
        """Return count, mean and 1 / sqrt(variance + eps) of a batch, and move running statistics towards them.

        Args:
            x: the batch, or a part of it.
            eps: added to the (biased) variance.
            gather: turns this part's moments into rows of all parts' moments, which are merged in order; None where x
                is the whole batch.
            running: mean and (unbiased) variance, changed in place: ``momentum`` of the new one, the rest of the old
                one. An empty batch, or one with NaN, leaves them, one value a channel the variance.
            momentum: see ``running``.
        """
        raise NotImplementedError

    def normalise_channels(
        self,
        x: Array,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None = None,
        relu: bool = False,
    ) -> tuple[Array, Any]:
        """Return (x - mean) * rstd * weight + bias + residual, not below 0 if ``relu``, and saved.

        The arithmetic is in float32 or wider, rounded once. The three methods below leave ``saved`` intact.
        """
        raise NotImplementedError

    def channel_sums(
        self,
        g: Array,
        saved: Any,
        gain: tuple[Array, float] | None = None,
        shift: tuple[Array, float] | None = None,
        other: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the float64 sums (2, C) of g and of g * normalised x, and g for what follows.

        The sums are of the gradient before ReLU. The second result goes to :meth:`normalise_channels_backward`; with a
        residual it is that one's gradient.

        Args:
            g: the gradient of the result of :meth:`normalise_channels`.
            saved: its second result.
            gain, shift: (out, beta) to write the gradients of weight and bias into, the sums themselves; or None.
            other: a second part of the gradient, to be added to g; or None.
        """
        raise NotImplementedError

    def normalise_channels_backward(
        self, g: Array, saved: Any, sums: Array | None = None, count: Array | None = None
    ) -> Array:
        """Return rstd * weight * (g - sums[0] / count - normalised x * sums[1] / count), the gradient of x.

        Args:
            g: the second result of :meth:`channel_sums`.
            saved: as there.
            sums, count: of the whole batch; None where mean and rstd do not depend on x.
        """
        raise NotImplementedError

    # -- windows: images are (N, C, H, W) -------------------------------------------------------------------

    def conv2d(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        windows: Windows,
        groups: int,
        relu: bool,
        engine: str = "auto",
    ) -> Array:
        """Return the cross-correlation of x with weight (O, C / groups, I, J), plus bias (O,), then max(., 0) if
        ``relu``: (N, O, P, Q). Some window fits the padded image.

        Args:
            engine: ``"plain"`` (matrix products), ``"cudnn"``, or ``"auto"``: cuDNN where it has this convolution.

        Raises:
            ValueError: ``"cudnn"`` for what it has not.
            MissingDependencyError: ``"cudnn"`` without its package.
        """  # fmt: skip
        raise NotImplementedError

    def conv2d_backward(
        self,
        g: Array,
        x: Array,
        weight: Array,
        out: Array | None,
        windows: Windows,
        groups: int,
        wants: tuple[bool, bool, bool],
        into: Into = (None, None),
        engine: str = "auto",
    ) -> tuple[Array | None, Array | None, Array | None]:
        """Return the gradients of :meth:`conv2d` with respect to x, weight and bias, those that are wanted.

        Args:
            g: the gradient of the result.
            x, weight: as given to :meth:`conv2d`.
            out: its result, where it had ``relu``; else None.
            windows, groups: as given.
            wants: which of the three to compute; the others are None.
            into: where those of weight and bias may be written; one that was is returned itself.
            engine: as given.
        """
        raise NotImplementedError

    def max_pool2d(self, x: Array, windows: Windows, relu: bool) -> tuple[Array, Any]:
        """Return the maximum of each window, not below 0 if ``relu``, and saved; padding is -inf."""
        raise NotImplementedError

    def max_pool2d_backward(self, g: Array, saved: Any, windows: Windows, relu: bool) -> Array:
        """Return the gradient with respect to x; the first of equal maxima, row by row, takes all of it."""
        raise NotImplementedError

    def avg_pool2d(self, x: Array, windows: Windows) -> Array:
        """Return the mean of each window; padding is 0 and counts."""
        raise NotImplementedError

    def avg_pool2d_backward(self, g: Array, shape: Shape, windows: Windows) -> Array:
        """Return the gradient with respect to x of the given shape."""
        raise NotImplementedError

    def global_avg_pool2d(self, x: Array) -> Array:
        """Return the mean of each channel over all pixels, (N, C); 0 where there is no pixel."""
        raise NotImplementedError

    def global_avg_pool2d_backward(self, g: Array, shape: Shape) -> Array:
        """Return the gradient with respect to x of the given shape."""
        raise NotImplementedError
