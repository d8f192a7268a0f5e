"""The benchmark's counter of locks, its table of interference, and the MPS daemon that it starts."""

import os
import time

import pytest

from mpdp.bench.contention import interference, locks, loops, mps, rule, tables
from mpdp.bench.contention.targets import Launch
from mpdp.bench.contention.workers import Processes, Workers, environment

compiled = pytest.mark.skipif(isinstance(loops.loops(), str), reason="no C compiler")


def nap(locked):
    return Launch("sleep", microseconds=300, locked=locked)


@compiled
def test_the_locks_that_launches_take_are_counted():
    said = []
    wanted, ks, n = [nap(False), nap(True)], (1, 2), 50
    rows = locks.count(0, wanted, ks, [], environment(mps=False), said.append, n)
    assert said == [] and [(row["launch"], row["k"]) for row in rows] == [
        ("mock of 300 us", 1), ("mock of 300 us", 2), ("mock of 300 us, one lock", 1), ("mock of 300 us, one lock", 2),
    ]  # fmt: skip
    warm_up = 16
    assert [row["calls"] for row in rows] == [0, 0, n + warm_up, 2 * (n + warm_up)]
    assert [row["contended"] > 0 for row in rows] == [False, False, False, True]
    assert rows[3]["waited_seconds"] > 0.5 * n * 300e-6 and rows[2]["waited_seconds"] == 0
    # A sleep does not leave the core where its time was over before it began.
    assert all(row["voluntary_switches"] >= n * row["k"] / 2 for row in rows)
    lines = tables.locks_table(rows).splitlines()
    assert len(lines) == 5 and lines[4].startswith("mock of 300 us, one lock  2")


@compiled
def test_locks_that_cannot_be_counted_are_said():
    said = []
    assert locks.count(1, [Launch("kernel")], (1,), [], environment(mps=False), said.append, 5) == []
    (why,) = said
    assert why.startswith(
        "locks are not counted: null kernel, k = 1: the counter of locks: expected an answer, got "
    )


def test_locks_without_a_compiler_are_said(monkeypatch):
    def none(name):
        raise RuntimeError("no C compiler (cc, gcc, clang)")

    said = []
    monkeypatch.setattr(locks.c, "library", none)
    assert locks.count(0, [nap(True)], (1,), [], {}, said.append) == []
    assert said == ["locks are not counted: no C compiler (cc, gcc, clang)"]


@pytest.mark.parametrize(
    ("contended", "waited", "word"),
    [(0, 0.0, "undecided"), (2, 0.0, "lock"), (0, 0.03, "lock"), (0, 0.01, "undecided")],
)
def test_waiting_for_locks_is_what_makes_a_lock(contended, waited, word):
    def row(name, k, scaling):
        told = None if k == 1 else (scaling, scaling, scaling)
        return {
            "row": name, "k": k, "accepted": 3, "scaling": told, "enqueued_scaling": told, "p99_us": 5.0,
            "voluntary_switches": 0,
        }  # fmt: skip

    counted = {
        "k": 2,
        "launches": 100,
        "contended": contended,
        "waited_seconds": waited,
        "enqueued_per_second": 1000.0,
    }
    rows = [row("t", 1, 1), row("t", 2, 1), row("p", 1, 1), row("p", 2, 2)]
    verdict = rule.decide(
        rows, threads="t", processes="p", wanted=3, gpus=1, machine="m", locks=[counted | {"k": 1}, counted]
    )
    assert verdict.word == word


# -- interference


@pytest.fixture
def crew():
    workers = Workers(0, {"processes": Processes(environment(mps=False))})
    yield workers
    workers.close()


def measured(crew, locked, free=lambda k: 1.0, others=None):
    said, kept = [], []
    rows = interference.measure(
        crew, free, [], repetitions=2, seconds=0.05, until=time.monotonic() + 60, keep=kept.append, say=said.append,
        launch=nap(locked), others=[nap(locked)] if others is None else others,
    )  # fmt: skip
    return rows, said, kept


@compiled
@pytest.mark.parametrize("locked", [False, True])
def test_a_lock_that_another_thread_holds_is_seen_and_one_of_another_process_is_not(crew, locked):
    rows, said, kept = measured(crew, locked)
    assert said == [] and len(kept) == 6 and {row["accepted"] for row in rows} == {2}
    alone, *beside = rows
    assert (alone["other"], alone["by"]) == ("nothing", "") and "p99_ratio" not in alone
    both = {row["by"]: (row["per_second"] + row["others_per_second"]) / alone["per_second"] for row in beside}
    assert both["processes"] > 1.5 and (both["thread"] > 1.5) == (not locked)
    assert all(row["p99_ratio"][0] > 0 and row["max_us"] >= row["p50_us"] >= 300 for row in beside)
    assert all(sample["n"] == sum(sample["histogram"]) > 20 for sample in kept if not sample["by"])
    lines = tables.interference_table(rows).splitlines()
    assert lines[1].startswith("nothing") and ", by a thread " in "".join(lines)


@compiled
def test_interference_counts_on_free_cores_alone(crew):
    rows, _, kept = measured(crew, True, lambda k: 0.5)
    assert {(row["accepted"], row["refused"]) for row in rows} == {(0, 8)} and len(kept) == 24
    assert tables.interference_table(rows).count("(cores busy)") == 3


@compiled
def test_what_does_not_work_beside_is_said(crew):
    rows, said, _ = measured(crew, False, others=[Launch("module load")])
    assert [row["other"] for row in rows if row["accepted"]] == ["nothing"] and len(said) == 2
    assert said[0].startswith("left out: launches beside cuModuleLoadData and cuModuleUnload")


# -- MPS

_CONTROL = """#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    {start}
else
    read -r word rest
    [ "$word" = quit ] && kill "$(cat "$pid")"
fi
"""


@pytest.fixture
def control(monkeypatch, tmp_path):
    """Put a program of the daemon's name on PATH, which does this to start."""
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setattr(mps, "_DEFAULT", str(tmp_path / "none"))

    def make(start):
        path = tmp_path / mps.CONTROL
        path.write_text(_CONTROL.format(start=start))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_daemon_of_its_own_is_started_and_stopped(control):
    control('sleep 100 >/dev/null 2>&1 </dev/null & echo $! >"$pid"')
    with mps.service(os.environ) as served:
        folder = served[mps.PIPES]
        assert served == {mps.PIPES: folder, mps.LOGS: folder} and folder != mps._DEFAULT
        assert os.stat(folder).st_mode & 0o077 == 0
        with open(f"{folder}/{mps.CONTROL}.pid") as file:
            pid = int(file.read())
        assert is_alive(pid)
        with mps.service({**os.environ, **served}) as again:  # one that runs is used, and left running
            assert again == {mps.PIPES: folder}
        assert is_alive(pid)
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid) and not os.path.exists(folder)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (
            "echo no right to do that >&2; exit 3",
            r"nvidia-cuda-mps-control: status 3 ['no right to do that']",
        ),
        (":", "nvidia-cuda-mps-control -d: expected a daemon, got none"),
    ],
)
def test_a_daemon_that_does_not_start_is_said(control, monkeypatch, start, why):
    monkeypatch.setattr(mps, "_APPEARS", 0.1)
    control(start)
    with mps.service(os.environ) as served:
        assert isinstance(served, str) and served.startswith(why)


def test_no_daemon_is_said(control, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.service(os.environ) as served:
        assert served == "nvidia-cuda-mps-control is not on PATH"
