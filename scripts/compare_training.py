"""Compare what mpdp and PyTorch reach on real data: the same model, data and updates, several seeds each.

    python scripts/compare_training.py scripts/train_images.py --torch-python PATH -n 2 --json images.json -- --epochs 5
    python scripts/compare_training.py scripts/train_chargpt.py --torch-python PATH -n 2 -- --updates 300

What stands behind ``--`` goes to the training script. mpdp trains on ``-n`` ranks, PyTorch in one process. Prints the
figure of each seed, the means, and whether the ranges overlap: those of three seeds each miss one another in one case
of ten where nothing differs but chance.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import mpdp
from mpdp.comm.tuned import processor

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "scripts" / "peers" / "torch_train.py"
FIGURES = {"accuracy": "test accuracy", "bits": "bits a character"}


def main():
    words, theirs = sys.argv[1:], []
    if "--" in words:
        words, theirs = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path, help="scripts/train_images.py or scripts/train_chargpt.py")
    parser.add_argument("--torch-python", required=True, help="an interpreter that has PyTorch")
    parser.add_argument("-n", type=int, default=1, help="ranks of mpdp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(words)
    told = ["PATH" if os.path.isabs(word) else word for word in sys.argv[1:]]
    result = {
        "command": " ".join(["python", "scripts/compare_training.py", *told]),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "device": arguments.device if arguments.device == "cpu" else mpdp.devices()[0].name,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ranks": arguments.n,
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, theirs, Path(folder), result)
    figure = next(name for name in FIGURES if name in rows["mpdp"][0])
    print(f"{FIGURES[figure]} after {rows['mpdp'][0]['updates']} updates")
    ranges = {}
    for name, found in rows.items():
        values = [row[figure] for row in found]
        ranges[name] = min(values), max(values)
        result[name] = {figure: values, "mean": sum(values) / len(values)}
        each = " ".join(f"{value:.4f}" for value in values)
        print(f"{name:6} {each}   mean {result[name]['mean']:.4f}")
    result["ranges_overlap"] = (
        ranges["mpdp"][0] <= ranges["torch"][1] and ranges["torch"][0] <= ranges["mpdp"][1]
    )
    print(f"ranges of seeds overlap: {'yes' if result['ranges_overlap'] else 'no'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def compare(arguments, theirs, folder, result):
    """Train with every seed, in turns; return the rows of each system, and note settings and version."""
    export = folder / "data.npz"
    call([sys.executable, arguments.script, *theirs, "--device", "cpu", "--export", export])
    result["settings"] = json.loads(str(np.load(export)["settings"]))

    def one(job):
        name, seed = job
        if name == "torch":
            line = [arguments.torch_python, PEER, export, "--seed", seed, "--device", arguments.device]
            return json.loads(call(line).splitlines()[-1])
        answer = folder / f"{seed}.json"
        line = [sys.executable, "-m", "mpdp", "run", "-n", arguments.n, arguments.script, *theirs]
        line += ["--device", arguments.device, "--seed", seed]
        call([*line, "--run-dir", folder / f"run-{seed}", "--json", answer])
        return json.loads(answer.read_text())

    rows = {"mpdp": [], "torch": []}
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in rows]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (name, _), row in zip(jobs, pool.map(one, jobs)):
            if "torch" in row:
                result["torch_version"] = row.pop("torch")
            rows[name].append(row)
            print(f"{name}: {row}", file=sys.stderr, flush=True)
    return rows


def call(line):
    """Run a command and return what it printed; show all of it where it failed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, line))}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
