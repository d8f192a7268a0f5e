"""Train a small network on Fashion-MNIST (70,000 images of 28 x 28 pixels, 10 kinds of clothing).

    mpdp run -n 2 scripts/train_images.py
    mpdp run -n 2 scripts/train_images.py --model convnet --data-dir DIR

The images come from Debian's package ``dataset-fashion-mnist``: its four ``.gz`` files, in ``--data-dir`` or where the
package puts them. The last two lines of the output are the test accuracy, as a fraction, and the run directory.
"""

import argparse
import gzip
import struct
import sys
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim

RUNS = Path(__file__).resolve().parent.parent / "runs"

SYSTEM = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
HOW_TO_GET = """\
Fashion-MNIST: expected {names} in {folder}, found none; get them with
    apt-get install dataset-fashion-mnist
or, without root,
    apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb DIR
    and pass --data-dir DIR/usr/share/datasets/fashion-mnist"""


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


def find(data_dir):
    """Return the folder that holds the four files, or None."""
    folder = Path(data_dir or SYSTEM)
    return folder if all((folder / name).is_file() for pair in FILES.values() for name in pair) else None


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
    network = nn.models.convnet() if name == "convnet" else nn.models.resnet18(10, channels=1)
    return nn.Sequential(lambda x: x.reshape(len(x), 1, 28, 28), network)


def load(folder, part):
    """Return one part as a data set: pixels as float32 with mean 0 and deviation 1, labels as int64."""
    images, labels = (read_idx(folder / name) for name in FILES[part])
    x = images.reshape(len(images), -1).astype(np.float32)
    x -= 72.94  # mean and deviation of the training pixels
    x /= 90.02
    return data.ArrayDataset(x, labels.astype(np.int64))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=None, help=f"folder with the four files (default: {SYSTEM})")
    parser.add_argument("--model", choices=["mlp", "convnet", "resnet18"], default="mlp")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--run-dir", type=Path, default=None, help="default: a new folder under runs/ of the checkout"
    )
    parser.add_argument("--save-every", type=int, default=500, help="updates between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the newest checkpoint of --run-dir")
    arguments = parser.parse_args()
    if arguments.resume and arguments.run_dir is None:
        parser.error(
            "--resume: expected --run-dir with it, got none; name the folder of the run to go on with"
        )

    world = mpdp.init(device=arguments.device)
    folder = find(arguments.data_dir)
    if folder is None:
        if world.rank == 0:
            names = ", ".join(name for pair in FILES.values() for name in pair)
            print(HOW_TO_GET.format(names=names, folder=arguments.data_dir or SYSTEM), file=sys.stderr)
        sys.exit(1)
    mpdp.seed(arguments.seed)
    train, test = load(folder, "train"), load(folder, "test")
    model = build(arguments.model)
    updates = arguments.epochs * -(-len(train) // arguments.global_batch_size)
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(lr=arguments.lr, weight_decay=0.01),
        world=world,
        schedule=optim.WarmupCosine(updates // 20, updates),
        seed=arguments.seed,
        run_dir=arguments.run_dir or mpdp.new_run_dir("images", base=RUNS),
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
