"""Train an MLP on the handwritten digits that scikit-learn brings along (1797 images of 8 x 8 pixels).

    mpdp run -n 2 scripts/train_digits.py
    mpirun -n 2 python scripts/train_digits.py
    python scripts/train_digits.py

The last two lines of its output are the test accuracy, as a fraction, and the run directory.
"""

import argparse
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim

RUNS = Path(__file__).resolve().parent.parent / "runs"


def load(seed):
    """Return (train, test): pixels scaled to 0..1, shuffled and split 80 to 20 by a fixed seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data / 16.0).astype(np.float32)
    y = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(x))
    cut = len(x) * 4 // 5
    first, rest = order[:cut], order[cut:]
    return data.ArrayDataset(x[first], y[first]), data.ArrayDataset(x[rest], y[rest])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--run-dir", type=Path, default=None, help="default: a new folder under runs/ of the checkout"
    )
    parser.add_argument("--save-every", type=int, default=200, help="updates between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the newest checkpoint of --run-dir")
    arguments = parser.parse_args()
    if arguments.resume and arguments.run_dir is None:
        parser.error(
            "--resume: expected --run-dir with it, got none; name the folder of the run to go on with"
        )

    world = mpdp.init(device=arguments.device)
    mpdp.seed(arguments.seed)
    train, test = load(arguments.seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    updates = arguments.epochs * -(-len(train) // arguments.global_batch_size)
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(lr=arguments.lr, weight_decay=0.01),
        world=world,
        schedule=optim.WarmupCosine(updates // 20, updates),
        seed=arguments.seed,
        run_dir=arguments.run_dir or mpdp.new_run_dir("digits", base=RUNS),
        save_every=arguments.save_every,
    )
    if arguments.resume:
        trainer.resume()
    trainer.fit(
        train,
        epochs=arguments.epochs,
        global_batch_size=arguments.global_batch_size,
        validation=test,
        metrics=[nn.accuracy],
    )
    accuracy = trainer.evaluate(test, metrics=[nn.accuracy])["accuracy"]
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f}")
        print(f"run directory {trainer.run_dir}", flush=True)


if __name__ == "__main__":
    main()
