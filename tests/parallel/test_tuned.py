"""Measured sizes on ranks that are processes: kept, read by rank 0 alone, used by all, and no bit depends on them."""

import json
import re
import sys

import launching
import pytest
from launching import PROGRAMS

from mpdp.comm import tuned

PROGRAM = PROGRAMS / "tuned.py"
SIZES = {"small_bytes": 128, "piece_bytes": 8192, "chunk_bytes": 64 << 10}


def keep(monkeypatch, folder, transport, machine, sizes):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    path = tuned.write(transport, machine, sizes)
    monkeypatch.delenv("XDG_CACHE_HOME")
    return path


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_use_what_rank_0_has_and_the_bits_stay(job, tmp_path, monkeypatch, size):
    mine, others = tmp_path / "mine", tmp_path / "others"
    without = job(PROGRAM, str(mine), str(others), n=size).check()
    assert "tuned" not in without.output
    machine = without.results[0]["hardware"]
    keep(monkeypatch, mine, "shared_memory", machine, SIZES)
    keep(monkeypatch, others, "shared_memory", machine, {"small_bytes": 4096})
    keep(monkeypatch, others, "mpi", machine, {"piece_bytes": 1 << 20}).write_text("broken")
    result = job(PROGRAM, str(mine), str(others), n=size).check()
    for rank, value in enumerate(result.results):
        assert {name: value[name] for name in SIZES} == SIZES
        assert value["chunks"] > without.results[rank]["chunks"]
        assert value["bits"] == without.results[rank]["bits"]
    assert "warning" not in result.output  # nobody has looked at the others' files
    assert re.search(
        r"transport shared_memory \(.*; tuned: small_bytes 128, piece_bytes 8192, chunk_bytes 65536\)",
        result.output,
    ), result


def test_mpi_takes_its_own(job, tmp_path, monkeypatch):
    words = [str(tmp_path), str(tmp_path), "mpi"]
    without = job(PROGRAM, *words, n=2).check()
    sizes = {"piece_bytes": 64 << 10, "chunk_bytes": 128 << 10}
    keep(monkeypatch, tmp_path, "mpi", without.results[0]["hardware"], sizes)
    result = job(PROGRAM, *words, n=2).check()
    for value in result.results:
        assert {name: value[name] for name in sizes} == sizes
        assert value["bits"] == without.results[0]["bits"]  # two numbers have one sum
    assert "transport mpi (as asked for; tuned: piece_bytes 65536, chunk_bytes 131072)" in result.output


def test_a_broken_file_is_one_warning(job, tmp_path, monkeypatch):
    words = [str(tmp_path), str(tmp_path)]
    without = job(PROGRAM, *words, n=2).check()
    path = keep(monkeypatch, tmp_path, "shared_memory", without.results[0]["hardware"], SIZES)
    path.write_text(path.read_text().replace("8192", "4096"))
    result = job(PROGRAM, *words, n=2).check()
    assert result.results == without.results
    assert result.output.count("warning") == 1
    assert f"{path} is broken (its content does not fit its checksum)" in result.output


@pytest.mark.parametrize("size", [2, 3])
def test_tuning_is_kept_for_the_next_start(job, tmp_path, size):
    line, settings = launching.mpirun(size)
    result = tmp_path / "result.json"
    words = ["-m", "mpdp", "bench", "all-reduce", "--tune", "--quick", "--json", str(result)]
    environ = {**settings, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = launching.run([*line, sys.executable, *words], environ=environ, timeout=120).check()
    found = json.loads(result.read_text())
    assert list(found["tuned"]) == ["shared_memory", "mpi"]
    for name, row in found["tuned"].items():
        assert set(row["sizes"]) == set(tuned.TUNABLE[name])
        assert f"{name}: kept in {row['path']}" in done.output
        assert all(min(m.get("us", m.get("one_phase_us")).values()) > 0 for m in row["measured"].values())
    again = job(PROGRAM, n=size, environ=environ).check()
    expected = found["tuned"]["shared_memory"]["sizes"]
    assert all({name: value[name] for name in expected} == expected for value in again.results)
    assert all(value["hardware"] == found["hardware"] for value in again.results)
    assert "; tuned: small_bytes " in again.output


def test_a_cache_that_cannot_be_written_is_found_before_anything_is_measured(job, tmp_path):
    line, settings = launching.mpirun(2)
    (tmp_path / "file").touch()
    words = ["-m", "mpdp", "bench", "all-reduce", "--tune", "--quick"]
    environ = {**settings, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = launching.run([*line, sys.executable, *words], environ=environ)
    assert done.rc != 0 and not done.timed_out and not done.orphans, done
    assert "NotADirectoryError" in done.output and "small_bytes" not in done.output
