"""Train a character-level GPT on the sources of Python's own standard library, and let it write a few lines.

    mpdp run -n 2 scripts/train_chargpt.py
    mpdp run -n 2 scripts/train_chargpt.py --precision bfloat16
    mpdp run -n 2 scripts/train_chargpt.py --text FILE

Characters outside of ASCII are one symbol. The sizes given by default train for about a minute on two CPU cores; on a
GPU try ``--layers 6 --width 384 --heads 6 --context 256 --global-batch-size 64 --precision bfloat16``. The output ends
with the loss in bits a character, a sample, and the run directory.
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim
from mpdp.nn.models import GPT

RUNS = Path(__file__).resolve().parent.parent / "runs"
WEIGHT_DECAY, CLIP_NORM, FINAL = 0.1, 1.0, 0.1
SIZES = ("layers", "width", "heads", "context")
VOCABULARY = 128  # ASCII; 127 stands for everything else


def read_text(path):
    """Return the text as symbols: of one file, or of the standard library's modules in the order of their names."""
    files = [Path(path)] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files).decode("utf-8", errors="replace")
    codes = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
    return np.minimum(codes, VOCABULARY - 1).astype(np.uint8)


def write_sample(trainer, prompt, length, seed):
    """Return ``prompt`` and ``length`` more characters, each drawn from the model's distribution."""
    xp = mpdp.current_world().device.xp
    model = trainer.model.eval()
    symbols = [min(ord(c), VOCABULARY - 1) for c in prompt]
    draws = mpdp.random.uniform(mpdp.random.derive_key(seed, "sample"), length)
    with mpdp.no_grad():
        for draw in draws:
            window = xp.asarray([symbols[-model.context :]], dtype=np.int64)
            # Not model(window): with sharded weights in 16 bits the model by itself has no float32 ones.
            logits = trainer.parallel(window).data[0, -1].astype(np.float64)
            logits = logits if xp is np else xp.asnumpy(logits)
            chances = np.exp((logits - logits.max()) / 0.8)
            symbols.append(int(np.searchsorted(np.cumsum(chances) / chances.sum(), draw)))
    return "".join(chr(s) if s in (9, 10) or 32 <= s < 127 else "?" for s in symbols)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", default=None, help="a file to learn from (default: Python's standard library)"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument(
        "--global-batch-size", type=int, default=32, help="sequences an update, over all ranks"
    )
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
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
    parser.add_argument("--save-every", type=int, default=200, help="updates between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the newest checkpoint of --run-dir")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
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
    symbols = read_text(arguments.text)
    cut = len(symbols) * 19 // 20
    learnt, held_out = symbols[:cut], symbols[cut:][: 512 * arguments.context + 1]
    warmup = max(1, arguments.updates // 20)
    if arguments.export is not None:
        names = (*SIZES, "global_batch_size", "updates", "lr", "precision", "seed")
        settings = {name: getattr(arguments, name) for name in names}
        settings |= {"model": "gpt", "vocabulary": VOCABULARY, "warmup": warmup, "final": FINAL}
        settings |= {"weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM}
        np.savez(arguments.export, symbols=learnt, test_symbols=held_out, settings=json.dumps(settings))
        return

    world = mpdp.init(device=arguments.device)
    mpdp.seed(arguments.seed)
    model = GPT(**{name: getattr(arguments, name) for name in SIZES}, vocabulary=VOCABULARY)
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(
            lr=arguments.lr, weight_decay=WEIGHT_DECAY, groups=[optim.Group("*.bias", weight_decay=0.0)]
        ),
        world=world,
        schedule=optim.WarmupCosine(warmup, arguments.updates, final=FINAL),
        precision=arguments.precision,
        placement=arguments.placement,
        clip_norm=CLIP_NORM,
        seed=arguments.seed,
        run_dir=arguments.run_dir or mpdp.new_run_dir("chargpt", base=RUNS),
        save_every=arguments.save_every,
    )
    if arguments.resume:
        trainer.resume()
    trainer.fit(
        data.TokenDataset(learnt, arguments.context),
        updates=arguments.updates,
        global_batch_size=arguments.global_batch_size,
    )
    test = data.TokenDataset(held_out, arguments.context)
    bits = trainer.evaluate(test, global_batch_size=arguments.global_batch_size)["loss"] / math.log(2)
    if world.rank == 0:
        if arguments.json is not None:
            row = {"seed": arguments.seed, "updates": trainer.step_count, "bits": bits}
            arguments.json.write_text(json.dumps(row) + "\n")
        print(f"test loss {bits:.4f} bits a character after {trainer.step_count} updates")
        print(write_sample(trainer, "def ", arguments.sample, arguments.seed))
        print(f"run directory {trainer.run_dir}", flush=True)


if __name__ == "__main__":
    main()
