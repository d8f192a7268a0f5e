"""Train two layers on handwritten digits with forward and backward pass written by hand, and no autodiff.

    mpdp run -n 2 scripts/hand_gradients.py

``mpdp.GradientArena`` holds the gradients, ``mpdp.Reducer`` adds them up over the ranks while the rest of backward
still runs; the update is three lines of NumPy (or CuPy, with ``--device cuda``). Any number of ranks gives the same
result, to rounding. The digits are those of scikit-learn (extra ``examples``). Prints the test accuracy, as a fraction.
"""

import argparse

import numpy as np

import mpdp
from mpdp import data

WIDTH, CLASSES, BATCH, MOMENTUM = 128, 10, 64, 0.9


def load(xp):
    """Return (x, y) to train on and (x, y) to test on: pixels in 0..1, a fixed split of 80 to 20."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = xp.asarray(pixels[order] / 16, dtype="float32"), xp.asarray(labels[order])
    cut = len(x) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def forward(p, x):
    """Return (hidden, logits) of x (N, 64)."""
    hidden = x @ p["w1"] + p["b1"]
    hidden *= hidden > 0
    return hidden, hidden @ p["w2"] + p["b2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    world = mpdp.init(device=arguments.device)
    xp = world.device.xp
    (x, y), (test_x, test_y) = load(xp)

    # The same numbers on every rank, so nothing has to be sent before the first step.
    random = np.random.default_rng(arguments.seed)
    shapes = {"w1": (64, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, CLASSES), "b2": (CLASSES,)}
    p = {
        name: xp.asarray(
            random.normal(scale=shape[0] ** -0.5, size=shape) if len(shape) > 1 else np.zeros(shape)
        )
        for name, shape in shapes.items()
    }
    p = {name: value.astype("float32") for name, value in p.items()}
    velocity = {name: xp.zeros_like(value) for name, value in p.items()}
    arena = mpdp.GradientArena(shapes, "float32", world.device)
    reducer = mpdp.Reducer(arena)

    for _ in range(arguments.epochs):
        order = random.permutation(len(x))
        for first in range(0, len(x), BATCH):
            batch = order[first : first + BATCH]  # of all ranks; the last one is shorter
            start, stop = data.share(len(batch), world.size, world.rank)
            mine = xp.asarray(batch[start:stop])
            inputs, labels = x[mine], y[mine]

            hidden, logits = forward(p, inputs)
            logits -= logits.max(axis=1, keepdims=True)
            g = xp.exp(logits)
            g /= g.sum(axis=1, keepdims=True)
            g[xp.arange(len(labels)), labels] -= 1  # of the sum of cross-entropies over this rank's samples
            # Last layer first: while its gradient travels, that of the first layer is computed.
            xp.matmul(hidden.T, g, out=arena["w2"])
            arena["b2"][...] = g.sum(axis=0)
            reducer.ready("b2")
            reducer.ready("w2")
            g = (g @ p["w2"].T) * (hidden > 0)
            xp.matmul(inputs.T, g, out=arena["w1"])
            arena["b1"][...] = g.sum(axis=0)
            reducer.finish(count=len(labels))  # announces the rest, and divides by the samples of all ranks

            for name, weights in p.items():
                velocity[name] *= MOMENTUM
                velocity[name] += arena[name]
                weights -= arguments.lr * velocity[name]

    start, stop = data.share(len(test_x), world.size, world.rank)
    right = forward(p, test_x[start:stop])[1].argmax(axis=1) == test_y[start:stop]
    counts = np.array([int(right.sum()), len(right)])
    world.axis("data").all_reduce(counts)
    if world.rank == 0:
        print(f"test accuracy {counts[0] / counts[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
