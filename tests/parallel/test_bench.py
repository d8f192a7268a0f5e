"""The benchmarks under a launcher."""

import json
import sys

import launching
import pytest


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_measures_every_transport_and_checks_every_sum(job, tmp_path, size):
    path = tmp_path / "result.json"
    line, settings = launching.mpirun(size)
    words = ["-m", "mpdp", "bench", "all-reduce", "--quick", "--sizes", "8,20000,1M", "--json", str(path)]
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
        "--json",
    ]
    launching.run([*line, sys.executable, *words, str(path)], environ=settings, timeout=60).check()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["right"]) for row in rows] == [("shared_memory", True), ("mpi", True)]
