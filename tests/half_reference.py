"""Plain NumPy training of the reference's network in 16 bits: the oracle of the tests of precision.

Weights, moments, gradients and losses are float32; what forward and backward pass on is rounded to 16 bits once after
each operation, by ``ml_dtypes`` and NumPy. It knows nothing of mpdp but the order of samples and the dropout masks.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import reference

DTYPES = {"float32": np.float32, "tf32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def gradients(params, x, y, masks, dtype, seed):
    """Return (loss sum, count, float32 gradients of seed times the sum), all arithmetic in float32."""

    def rounded(a):
        return a.astype(dtype).astype(np.float32)

    keep = np.float32(1 / (1 - reference.DROP))
    ws = [rounded(p) for p in params]
    inputs, active = [rounded(x)], []
    for layer in range(3):
        z = rounded(inputs[-1] @ ws[2 * layer].T + ws[2 * layer + 1])
        if layer < 2:
            active.append(z > 0)
            z = rounded(np.maximum(z, 0) * (masks[layer] * keep)) if masks else np.maximum(z, 0)
        inputs.append(z)
    logits = inputs.pop()
    shifted = logits - logits.max(axis=1, keepdims=True)
    power = np.exp(shifted)
    norm = power.sum(axis=1)
    rows = np.arange(len(y))
    loss = float((np.log(norm) - shifted[rows, y]).sum(dtype=np.float64))
    g = power * (np.float32(seed) / norm)[:, None]
    g[rows, y] -= np.float32(seed)
    g = rounded(g)
    found = []
    for layer in (2, 1, 0):
        found = [g.T @ inputs[layer], g.sum(axis=0), *found]
        if layer:
            g = rounded(g @ ws[2 * layer])
            if masks:
                g = rounded(g * (masks[layer - 1] * keep))
            g = g * active[layer - 1]
    return loss, len(y), found


class Scale:
    """The loss scale's schedule, written out."""

    def __init__(self, value, interval):
        self.value, self.interval, self.good, self.skipped = value, interval, 0, 0

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value, self.skipped = self.value / 2, self.skipped + 1
        elif self.good == self.interval:
            self.value, self.good = self.value * 2, 0


def train(params, x, y, update, *, precision, seed, batch, updates, accumulate=1, clip=None, scale=None):
    """Train float32 params in place; return each update's mean loss."""
    from mpdp.data import Order
    from mpdp.random import dropout_mask

    exponent = round(np.log2(batch))
    losses = []
    order = itertools.chain.from_iterable(Order(len(x), seed, e, True).indices(0, len(x)) for e in range(99))
    for t in range(updates):
        chosen = np.array(list(itertools.islice(order, batch)))
        factor = 2.0**-exponent * (1.0 if scale is None else scale.value)
        total, count, sums = 0.0, 0, None
        for cut in np.array_split(np.arange(batch), accumulate):
            masks = [
                dropout_mask(seed, path, t, int(cut[0]), (len(cut), width), reference.DROP)
                for path, width in zip(reference.PATHS, reference.SIZES[1:])
            ]
            part = chosen[cut]
            with np.errstate(over="ignore", invalid="ignore"):  # an overflow is what the scale looks for
                loss, n, grads = gradients(params, x[part], y[part], masks, DTYPES[precision], factor)
            total, count = total + loss, count + n
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        losses.append(total / count)
        finite = all(np.isfinite(g).all() for g in sums)
        if scale is not None:
            scale.update(finite)
            if not finite:
                continue
        grads = [g * np.float32(1 / (factor * count)) for g in sums]
        if clip is not None:
            norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
            grads = [g * np.float32(min(1.0, clip / (norm + 1e-6))) for g in grads]
        update(params, grads, update.lr)
    return losses
