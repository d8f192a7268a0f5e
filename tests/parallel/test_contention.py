"""``mpdp bench contention`` as a whole, on CPUs and with a driver that launches nothing."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
from launching import PROGRAMS, ROOT, run


def test_a_quick_run_always_ends_with_a_verdict(job, tmp_path):
    path = tmp_path / "c.json"
    line = [
        sys.executable,
        "-m",
        "mpdp",
        "bench",
        "contention",
        "--device",
        "cpu",
        "--quick",
        "--json",
        str(path),
    ]
    result = run(line, timeout=90).check()
    assert result.output.strip().splitlines()[-1].startswith("verdict: ")
    found = json.loads(path.read_text())
    assert found["gpus"] == 0 and found["word"] in ("no contention", "lock", "undecided")
    assert f"verdict: {found['verdict']}" in result.output
    samples = [json.loads(text) for text in (tmp_path / "c.json.samples.jsonl").read_text().splitlines()]
    launches = [sample for sample in samples if "row" in sample]
    assert len(launches) == sum(row["accepted"] + row["refused"] for row in found["rows"]) > 0
    assert all(sum(sample["histogram"]) == sample["n"] * sample["k"] for sample in launches)
    (steps,) = found["steps"]
    assert set(steps["refused"]) == {"threads", "DataParallel in threads", "processes", "one process"}
    assert steps["about"]["threads"]["transport"] == "threads"
    assert steps["about"]["processes"]["transport"] == "shared_memory"
    assert all(seconds > 0 for blocks in steps["blocks"].values() for seconds in blocks)
    blocks = [sample for sample in samples if "step" in sample]
    for name, refused in steps["refused"].items():
        assert sum(sample["job"] == name for sample in blocks) == len(steps["blocks"][name]) + refused
    kept = run([sys.executable, "-m", "mpdp", "doctor"])
    assert "threads or processes: " in kept.output


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """The folder of a libcuda that launches nothing."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source, library = ROOT / "tests" / "fake_libcuda.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    return folder


@pytest.fixture
def daemon(tmp_path):
    """The folder of a program that does as the control daemon of MPS does."""
    path = tmp_path / "nvidia-cuda-mps-control"
    path.write_text(
        """#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    sleep 120 >/dev/null 2>&1 </dev/null & echo $! >"$pid"
else
    kill "$(cat "$pid")"
fi
"""
    )
    path.chmod(0o755)
    return tmp_path


def test_every_arm_runs(fake_driver):
    line = [sys.executable, str(PROGRAMS / "contention.py"), "all"]
    (found,) = run(line, timeout=120, environ={"LD_LIBRARY_PATH": str(fake_driver)}).check().results
    assert found["said"] == [] and found["rows"] == found["arms"] > 90


@pytest.mark.parametrize(
    ("lock", "word"), [(None, "no contention"), ("process", "lock"), ("context", "lock")]
)
def test_a_lock_of_a_driver_is_found_and_whose_it_is(fake_driver, lock, word):
    environ = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_LOCK": lock}
    result = run([sys.executable, str(PROGRAMS / "contention.py")], timeout=90, environ=environ).check()
    (found,) = result.results
    assert found["said"] == [] and found["word"] == word, found["line"]
    assert (found["threads"] > 1.6) == (lock is None)
    assert (found["own"] > 1.6) == (lock != "process")
    assert found["processes"] > 1.6
    launched = 100 + 16  # by a thread, with its warm-up
    assert found["locks"] == ([0, 0] if lock is None else [launched, 2 * launched])
    assert found["beside"]["said"] == [] and found["beside"]["rows"] == 11
    assert (found["beside"]["thread"] > 1.5) == (lock is None) and found["beside"]["processes"] > 1.5


def test_a_quick_run_with_a_driver_ends_with_a_verdict(job, fake_driver, daemon, tmp_path):
    path = tmp_path / "c.json"
    line = [
        sys.executable,
        "-m",
        "mpdp",
        "bench",
        "contention",
        "--device",
        "cuda",
        "--quick",
        "--json",
        str(path),
    ]
    search = f"{daemon}:{os.environ['PATH']}"
    environ = {"LD_LIBRARY_PATH": str(fake_driver), "CUDA_VISIBLE_DEVICES": "", "PATH": search}
    result = run(line, timeout=120, environ=environ).check()
    found = json.loads(path.read_text())
    assert (found["gpu"], found["gpus"]) == ("a fake GPU", 1) and found["verdict"] in result.output
    assert {row["launch"] for row in found["rows"]} >= {"null kernel", "null kernel, own contexts"}
    assert found["mps"] and any(row["workers"] == "processes MPS" for row in found["rows"])
    assert found["at_end"]["clocks"] is None and "hypervisor" in found
    assert "one GPU cannot decide whether processes train faster" in result.output
    assert found["training"].startswith("training: undecided")
    if importlib.util.find_spec("cupy") is None:
        assert (
            found["steps"] == []
            and "note: steps on a GPU are left out: CuPy is not installed" in result.output
        )
