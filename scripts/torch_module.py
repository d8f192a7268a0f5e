"""Train a PyTorch module on handwritten digits: its gradients are views of an arena that mpdp sums over the ranks.

    mpdp run -n 2 scripts/torch_module.py

Module, optimizer and random numbers are PyTorch's; ``mpdp.interop.torch`` gives every ``.grad`` its place in the arena,
by DLPack, so nothing is copied before or after a reduction. Any number of ranks gives the same result, to rounding.
Needs PyTorch, and scikit-learn for the digits. Prints the test accuracy, as a fraction.
"""

import argparse

import numpy as np

import mpdp
from mpdp import data
from mpdp.interop.torch import DataParallel, library

BATCH = 64


def load(torch, device):
    """Return (x, y) to train on and (x, y) to test on: pixels in 0..1, a fixed split of 80 to 20."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[order] / 16, dtype=torch.float32, device=device).view(-1, 1, 8, 8)
    y = torch.tensor(labels[order], device=device)
    cut = len(x) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    world = mpdp.init(device=arguments.device)
    torch = library()  # PyTorch, or an error that says how to install it
    nn, F = torch.nn, torch.nn.functional
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    (x, y), (test_x, test_y) = load(torch, str(world.device))
    module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).to(str(world.device))
    parallel = DataParallel(module, world)
    optimizer = torch.optim.AdamW(module.parameters(), lr=arguments.lr)
    random = np.random.default_rng(arguments.seed)

    for _ in range(arguments.epochs):
        order = random.permutation(len(x))  # the same on every rank
        for first in range(0, len(x), BATCH):
            batch = order[first : first + BATCH]  # of all ranks; the last one is shorter
            start, stop = data.share(len(batch), world.size, world.rank)
            mine = torch.from_numpy(batch[start:stop])
            loss = F.cross_entropy(module(x[mine]), y[mine], reduction="sum")
            parallel.backward(loss, count=len(mine))
            parallel.finish()
            optimizer.step()

    parallel.check_replicas()
    start, stop = data.share(len(test_x), world.size, world.rank)
    with torch.no_grad():
        right = module(test_x[start:stop]).argmax(1) == test_y[start:stop]
    counts = np.array([int(right.sum()), len(right)])
    world.axis("data").all_reduce(counts)
    if world.rank == 0:
        print(f"test accuracy {counts[0] / counts[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
