"""The benchmarks under a launcher."""

import importlib.util
import json
import os
import sys

import launching
import pytest


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_measures_every_transport_and_checks_every_sum(job, tmp_path, size):
    path = tmp_path / "result.json"
    line, settings = launching.mpirun(size)
    words = ["-m", "mpdp", "bench", "all-reduce", "--quick", "--sizes", "8,20000,1M", "--json", str(path)]
    words += ["--transports", "shared_memory,mpi,mpi4py"]
    launching.run([*line, sys.executable, *words], environ=settings, timeout=60).check()
    rows = json.loads(path.read_text())["rows"]
    assert all(row["right"] for row in rows)
    names = ["shared_memory", "mpi", "mpi4py"]
    assert [row["case"] for row in rows if row["bytes"] < 1 << 20] == names * 2
    assert [row["case"] for row in rows if row["bytes"] == 1 << 20] == [
        "shared_memory",
        "shared_memory, reducer",
        "mpi",
        "mpi, reducer",
        "mpi4py",
    ]
    assert all(row["busbw"] == pytest.approx(row["algbw"] * 2 * (size - 1) / size) for row in rows)


def test_all_reduce_between_nodes_measures_two_levels(job, tmp_path):
    path = tmp_path / "result.json"
    line, settings = launching.mpirun(3)
    words = ["-m", "mpdp", "bench", "all-reduce", "--quick", "--sizes", "8,1M", "--json", str(path)]
    launching.run(
        [*line, sys.executable, *words], environ={**settings, "MPDP_NODES": "2"}, timeout=60
    ).check()
    rows = json.loads(path.read_text())["rows"]
    assert all(row["right"] for row in rows)
    large = ["two_level", "two_level, reducer", "mpi", "mpi, reducer", "mpi4py"]
    assert [row["case"] for row in rows] == ["two_level", "mpi", "mpi4py", *large]


def test_sixteen_bit_floats_have_no_row_of_plain_mpi(job, tmp_path):
    path = tmp_path / "result.json"
    line, settings = launching.mpirun(2)
    words = [
        "-m",
        "mpdp",
        "bench",
        "all-reduce",
        "--quick",
        "--sizes",
        "1K",
        "--dtypes",
        "bfloat16",
        "--transports",
        "shared_memory,mpi,mpi4py",
        "--json",
    ]
    launching.run([*line, sys.executable, *words, str(path)], environ=settings, timeout=60).check()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["right"]) for row in rows] == [("shared_memory", True), ("mpi", True)]


def bench(size, path, *words, **more):
    line, settings = launching.mpirun(size)
    words = ["-m", "mpdp", "bench", "all-reduce", "--quick", "--json", str(path), *words]
    return launching.run([*line, sys.executable, *words], environ=settings, timeout=120, **more)


def test_a_torch_that_is_missing_is_one_error(job, tmp_path):
    result = bench(2, tmp_path / "result.json", "--torch-python", str(tmp_path / "missing"))
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    assert result.output.count("error in step 0: CommunicationError: torch: expected a Python at") == 1


def test_torch_takes_turns_with_the_transports(job, tmp_path):
    """Runs where torch is: in this Python, or in the one that MPDP_TORCH_PYTHON names."""
    python = os.environ.get("MPDP_TORCH_PYTHON")
    if python is None and importlib.util.find_spec("torch") is None:
        pytest.skip("this Python has no torch, and MPDP_TORCH_PYTHON names none")
    path = tmp_path / "result.json"
    words = ["--torch-python", python] if python else []
    bench(2, path, "--sizes", "8,1M", "--transports", "mpi,torch", *words).check()
    result = json.loads(path.read_text())
    assert result["torch"]
    assert [row["case"] for row in result["rows"]] == [
        "mpi",
        "torch gloo",
        "mpi",
        "mpi, reducer",
        "torch gloo",
    ]
    assert all(row["right"] for row in result["rows"])


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_on_a_gpu(gpu, job, tmp_path, size):
    path = tmp_path / "result.json"
    output = (
        bench(size, path, "--device", "cuda", "--sizes", "8,1M", "--dtypes", "float32,bfloat16")
        .check()
        .output
    )
    rows = json.loads(path.read_text())["rows"]
    assert all(row["right"] for row in rows)
    cases = {(row["dtype"], row["bytes"], row["case"]) for row in rows}
    for dtype in ("float32", "bfloat16"):
        for nbytes in (8, 1 << 20):
            for case in ("cuda_ipc", "cuda_ipc (graph)", "staged"):
                assert (dtype, nbytes, case) in cases
    assert ("float32", 1 << 20, "cuda_ipc, reducer") in cases
    assert ("float32", 8, "mpi4py") in cases and ("bfloat16", 8, "mpi4py") not in cases
    assert ("float32", 8, "nccl") in cases or output.count("not measured: nccl, ") == 1


@pytest.mark.parametrize("size", [2, 3])
def test_train_says_what_the_collectives_cost(job, tmp_path, size):
    path = tmp_path / "result.json"
    line, settings = launching.mpirun(size)
    words = ["-m", "mpdp", "bench", "train", "mlp", "--batch", "4", "--seconds", "0.1", "--blocks", "3"]
    done = launching.run(
        [*line, sys.executable, *words, "--json", str(path)], environ=settings, timeout=100
    ).check()
    result = json.loads(path.read_text())
    assert result["ranks"] == size
    assert result["silent_step_us"] > 0
    assert f"a step without them takes {result['silent_step_us']:.0f} us" in done.output
    (ours,) = result["sides"]
    assert ours["items_per_second"] == pytest.approx(4 * size / ours["step_us"] * 1e6)


def test_train_takes_turns_with_torch_and_has_its_losses(job, tmp_path):
    """Runs where torch is: in this Python, or in the one that MPDP_TORCH_PYTHON names."""
    python = os.environ.get("MPDP_TORCH_PYTHON")
    if python is None and importlib.util.find_spec("torch") is None:
        pytest.skip("this Python has no torch, and MPDP_TORCH_PYTHON names none")
    path = tmp_path / "result.json"
    peer = ["--peers", "torch", "--peer-python", python or sys.executable, "--json", str(path)]
    line, settings = launching.mpirun(2)
    words = ["-m", "mpdp", "bench", "train", "mlp", "--batch", "4", "--seconds", "0.05", "--blocks", "3"]
    launching.run([*line, sys.executable, *words, *peer], environ=settings, timeout=100).check()
    sides = json.loads(path.read_text())["sides"]
    assert [side["name"] for side in sides] == ["mpdp", "torch"]
    assert all(side["step_us"] > 0 and side["peak_bytes"] > 0 for side in sides)
    for workload, batch, updates in (("mlp", 128, 50), ("convnet", 8, 10)):
        words = ["-m", "mpdp", "bench", "train", workload, "--batch", str(batch), "--losses"]
        words += ["--weights", str(tmp_path / "weights.npz"), *peer]
        launching.run([sys.executable, *words], timeout=100).check()
        result = json.loads(path.read_text())
        assert result["updates"] == updates
        assert result["largest_relative_difference"] < 1e-5
