"""The gradient checker: backward rules against central differences of their forward rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernels
from ..device import device_of
from ..kernels.precision import is_floating
from .recording import no_grad
from .tensor import Tensor


def check(
    function: Callable[..., Tensor], *arrays: Any, eps: float = 1e-5, tolerance: float = 1e-6, seed: int = 0
) -> float:
    """Check the gradient of ``function`` at ``arrays``; return the largest relative difference found.

    **Local.** For each floating input x, a random direction d and a random incoming gradient w, both of unit
    length, compares the sum over elements of gradient * d with the central difference

        (sum(w * f(x + eps d)) - sum(w * f(x - eps d))) / (2 eps).

    The gradient is computed in the three ways that backward may ask for it: returned to the engine, written
    into new memory, and added to what is there. All must agree.

    Args:
        function: of tensors, returns one tensor; must give the same result each time.
        arrays: inputs, NumPy's or CuPy's; floating ones are taken as float64 and differentiated, others are
            passed as they are.
        eps: the step, in units of x.
        tolerance: of |difference| / max(1, |derivative|).
        seed: of the directions.

    Raises:
        AssertionError: naming input, both derivatives and their difference.

    Example:
        >>> from mpdp.autodiff import ops
        >>> check(ops.tanh, np.array([0.5, -1.0])) < 1e-6
        True
    """
    values = [kernels.of(a).xp.array(a, np.float64) if _differentiable(a) else a for a in arrays]
    random = np.random.default_rng(seed)
    with no_grad():
        out = function(*[Tensor(v) if _differentiable(v) else v for v in values])
    if not isinstance(out, Tensor):
        raise TypeError(
            f"check: expected the function to return a Tensor, got {type(out).__name__}; use operations"
        )
    incoming = _direction(random, out.shape)

    def weighted(changed: list[Any]) -> float:
        with no_grad():
            result = function(*[Tensor(v) if _differentiable(v) else v for v in changed])
        return float((result.numpy() * incoming).sum())

    leaves = [Tensor(v, requires_grad=True) if _differentiable(v) else v for v in values]
    passed = [leaf * 1.0 if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    returned = _gradients(function, passed, leaves, incoming)
    leaves = [Tensor(v, requires_grad=True) if _differentiable(v) else v for v in values]
    written = [None if g is None else g.copy() for g in _gradients(function, leaves, leaves, incoming)]
    added = _gradients(function, leaves, leaves, incoming)

    worst = 0.0
    for i, value in enumerate(values):
        if not _differentiable(value):
            continue
        direction = _direction(random, value.shape)
        changed = list(values)
        step = kernels.move(eps * direction, device_of(value))
        changed[i] = value + step
        above = weighted(changed)
        changed[i] = value - step
        numeric = (above - weighted(changed)) / (2 * eps)
        for how, gradient, times in (("returned", returned, 1), ("written", written, 1), ("added", added, 2)):
            found = gradient[i]
            analytic = 0.0 if found is None else float((found * direction).sum()) / times
            error = abs(analytic - numeric) / max(1.0, abs(numeric))
            if not error <= tolerance:  # NaN fails too
                raise AssertionError(
                    f"check: expected a derivative of {numeric:.9g} along a random direction of input {i} "
                    f"(central difference, eps {eps:g}), got {analytic:.9g} from backward ({how}); "
                    f"relative difference {error:.3g} > {tolerance:g}"
                )
            worst = max(worst, error)
    return worst


def _differentiable(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(value, float) if dtype is None else is_floating(dtype)


def _direction(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random array of length 1 (or empty)."""
    values = np.asarray(random.standard_normal(shape))
    return values / max(float(np.sqrt((values * values).sum())), 1e-300)


def _gradients(function: Callable[..., Tensor], inputs: list[Any], leaves: list[Any], seed: Any) -> list[Any]:
    """Run forward and backward once; return the gradient of each leaf."""
    out = function(*inputs)
    if out.requires_grad:
        out.backward(seed)
    grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
    return [None if grad is None else kernels.of(grad).to_numpy(grad) for grad in grads]
