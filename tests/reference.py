"""Plain NumPy training of an MLP with dropout, clipping and AdamW or SGD: the oracle of the exactness tests.

It knows nothing of mpdp but the public order of samples and the public dropout masks; gradients are written out
by hand.
"""

from __future__ import annotations

import itertools

import numpy as np

SIZES = (64, 48, 32, 10)
DROP = 0.25
PATHS = ("2", "5")  # where the two Dropout modules stand in the Sequential below


def weights(seed: int, dtype: str) -> list[np.ndarray]:
    """Return [w1, b1, w2, b2, w3, b3], the same for every caller."""
    random = np.random.default_rng(seed)
    arrays = []
    for i, o in itertools.pairwise(SIZES):
        arrays.append((random.standard_normal((o, i)) / np.sqrt(i)).astype(dtype))
        arrays.append((0.1 * random.standard_normal(o)).astype(dtype))
    return arrays


def digits(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16.0).astype(dtype), data.target.astype(np.int64)


def loss_and_gradients(params, x, y, masks, ignore_index=-100):
    """Return (loss sum, count, gradients of the sum, outputs) for one micro-batch."""
    w1, b1, w2, b2, w3, b3 = params
    scale = params[0].dtype.type(1.0 / (1.0 - DROP))
    z1 = x @ w1.T + b1
    h1 = np.maximum(z1, 0)
    d1 = h1 * masks[0] * scale if masks else h1
    z2 = d1 @ w2.T + b2
    h2 = np.maximum(z2, 0)
    d2 = h2 * masks[1] * scale if masks else h2
    logits = d2 @ w3.T + b3
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    keep = y != ignore_index
    rows = np.flatnonzero(keep)
    loss = -logs[rows, y[rows]].sum()
    g = np.exp(logs)
    g[rows, y[rows]] -= 1
    g[~keep] = 0
    gw3, gb3 = g.T @ d2, g.sum(axis=0)
    g = g @ w3
    g = (g * masks[1] * scale if masks else g) * (z2 > 0)
    gw2, gb2 = g.T @ d1, g.sum(axis=0)
    g = g @ w2
    g = (g * masks[0] * scale if masks else g) * (z1 > 0)
    return float(loss), int(keep.sum()), [g.T @ x, g.sum(axis=0), gw2, gb2, gw3, gb3], logits


class Sgd:
    """v = mu v + (g + wd p); p -= lr v, or with nesterov p -= lr (g + wd p + mu v)."""

    def __init__(self, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
        self.lr, self.mu, self.wd, self.nesterov = lr, momentum, weight_decay, nesterov
        self.v = None

    def __call__(self, params, grads, lr):
        self.v = self.v or [np.zeros_like(p) for p in params]
        for p, g, v in zip(params, grads, self.v):
            g = g + self.wd * p
            v *= self.mu
            v += g
            p -= (lr * (g + self.mu * v if self.nesterov else v)).astype(p.dtype)


class AdamW:
    """Adam with decoupled decay and bias correction."""

    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.wd = lr, betas, eps, weight_decay
        self.m = None
        self.t = 0

    def __call__(self, params, grads, lr):
        self.m = self.m or [(np.zeros_like(p), np.zeros_like(p)) for p in params]
        self.t += 1
        b1, b2 = self.betas
        for p, g, (m, v) in zip(params, grads, self.m):
            p *= p.dtype.type(1 - lr * self.wd)
            m *= b1
            m += (1 - b1) * g
            v *= b2
            v += (1 - b2) * g * g
            p -= (lr * (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + self.eps)).astype(p.dtype)


def train(
    params,
    x,
    y,
    update,
    *,
    seed,
    batch,
    updates,
    accumulate=1,
    clip=None,
    schedule=lambda t: 1.0,
    dropout=True,
):
    """Train in place; return the mean loss of each update and the mean loss of each finished epoch."""
    from mpdp.data import Order
    from mpdp.random import dropout_mask

    losses, epochs = [], []
    epoch, first, epoch_sum, epoch_count = 0, 0, 0.0, 0
    for t in range(updates):
        order = Order(len(x), seed, epoch, True).indices(0, len(x))
        chosen = order[first : first + batch]
        cuts = np.array_split(np.arange(len(chosen)), accumulate)
        total, count, sums = 0.0, 0, None
        for cut in cuts:
            if not len(cut):
                continue
            start = int(cut[0])
            masks = (
                [
                    dropout_mask(seed, path, t, start, (len(cut), width), DROP)
                    for path, width in zip(PATHS, SIZES[1:])
                ]
                if dropout
                else None
            )
            part = chosen[cut]
            loss, n, grads, _ = loss_and_gradients(params, x[part], y[part], masks)
            total, count = total + loss, count + n
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        grads = [g / params[0].dtype.type(count) for g in sums]
        if clip is not None:
            norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
            grads = [g * params[0].dtype.type(min(1.0, clip / (norm + 1e-6))) for g in grads]
        update(params, grads, update.lr * schedule(t))
        losses.append(total / count)
        epoch_sum, epoch_count = epoch_sum + total, epoch_count + count
        first += batch
        if first >= len(x):
            epochs.append(epoch_sum / epoch_count)
            epoch, first, epoch_sum, epoch_count = epoch + 1, 0, 0.0, 0
    return losses, epochs


def relative(a, b) -> float:
    """Return max |a - b| / max |b|."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)) if b.size else 0.0


def build_model(dtype: str):
    """Return the same network as an mpdp model, with the reference's weights."""
    from mpdp import nn

    s = SIZES
    model = nn.Sequential(
        nn.Linear(s[0], s[1], dtype=dtype),
        nn.ReLU(),
        nn.Dropout(DROP),
        nn.Linear(s[1], s[2], dtype=dtype),
        nn.ReLU(),
        nn.Dropout(DROP),
        nn.Linear(s[2], s[3], dtype=dtype),
    )
    for parameter, array in zip(model.parameters(), weights(1, dtype)):
        parameter.data = array
    return model
