"""The training steps of the contention benchmark: what follows from them, and what is said of what fails."""

import numpy as np
import pytest

import mpdp
from mpdp.bench.contention import rule, step_job, tables
from mpdp.bench.contention.arms import own_name
from mpdp.bench.contention.steps import DATA_PARALLEL, brief
from mpdp.bench.contention.targets import Launch
from mpdp.bench.contention.workers import row_name
from mpdp.errors import CommunicationError


def made(transport="shared_memory", **blocks):
    named = {
        name.replace("_", " ").replace(" staged", ", staged"): seconds for name, seconds in blocks.items()
    }
    return {"blocks": named, "about": {"processes": {"transport": transport}}}


SLOW, FAST, BOTH = [2.0] * 3, [1.0] * 3, [1.0, 1.2, 1.1]
STAGED = {"threads": SLOW, "processes": FAST, "threads_staged": FAST, "processes_staged": SLOW}


@pytest.mark.parametrize(
    ("found", "gpus", "line"),
    [
        (made(threads=SLOW, processes=FAST), 2, "training: take processes"),
        (made(threads=FAST, processes=SLOW), 0, "training: take threads"),
        (made(threads=[1.03] * 3, processes=FAST), 2, "training: either will do"),
        (made(threads=BOTH, processes=FAST), 2, "training: either will do"),
        (made(threads=SLOW, processes=FAST), 1, "training: a step of threads takes 2.00 times"),
        (
            made(threads=SLOW, processes=SLOW, processes_MPS=FAST),
            1,
            "training: a step of threads takes 2.00 times",
        ),
        (made(threads=SLOW), 2, "training: undecided"),
        (made(processes=SLOW), 2, "training: undecided"),
        (made("nccl", **STAGED), 2, "training: take threads"),
        (made("cuda_ipc", **STAGED), 2, "training: take processes"),
    ],
)
def test_what_follows_for_training(found, gpus, line):
    assert rule.advise(found, gpus).startswith(line)


def test_the_better_way_to_have_threads_counts():
    found = made(threads=SLOW, processes=FAST)
    found["blocks"][DATA_PARALLEL] = FAST
    assert rule.advise(found, 2).startswith("training: either will do: a step of threads takes 1.00 times")


@pytest.mark.parametrize(
    ("threads", "word"),
    [(0.97, "graphs suffice"), (0.5, "graphs do not suffice"), ((0.8, 1.0, 1.2), "undecided")],
)
def test_whether_graphs_suffice(threads, word):
    def samples(workers, nodes, k, rate):
        row = row_name(workers, "c", own_name(Launch("graph", nodes=nodes)))
        rates = rate if isinstance(rate, tuple) else (rate,) * 3
        return [{"row": row, "k": k, "per_second": each, "accepted": True} for each in rates]

    of_100 = samples("pthreads", 100, 4, threads) + samples("processes MPS", 100, 4, 1.0)
    refused = [{**sample, "per_second": 9.0, "accepted": False} for sample in of_100]
    most = samples("pthreads", 1000, 1, 700.0) + samples("pthreads", 1000, 4, 900.0)
    graphs, ceiling = rule.graph_readings([*of_100, *refused, *most], 1, True)
    assert graphs.startswith(f"graphs: {word}: 4 threads launch those of 100 ")
    assert ceiling.startswith("ceiling: graphs of 1000 complete at most 900,000 null kernels a second")
    assert rule.graph_readings(of_100, 2, False) == []  # four workers on two GPUs
    assert rule.graph_readings([], 0, False) == []


def test_steps_of_data_parallel_in_threads_are_those_of_the_trainer(monkeypatch):
    build, built = step_job.build, []
    monkeypatch.setattr(step_job, "build", lambda *words: built.append(build(*words)) or built[-1])
    world = mpdp.init()
    for make in (
        lambda: step_job._data_parallel(world, "mlp", 10, 3),
        lambda: step_job._own(world, "mlp", 10, "eager"),
    ):
        mpdp.seed(5)
        assert make()(4) > 0
    first, second = ([p.numpy() for p in each.model.parameters()] for each in built)
    mpdp.seed(5)
    for one, other, start in zip(first, second, build("mlp", 0, 10).model.parameters()):
        moved = np.abs(other - start.numpy()).max()
        assert moved > 1e-4 and np.abs(one - other).max() < 1e-3 * moved


def test_a_failure_is_told_in_a_line():
    error = CommunicationError(
        "steps of threads: expected an answer, got its end with status 1; it printed:\n"
        "Traceback (most recent call last):\n  File 'a'\n"
        "[0/2] error before init: MissingDependencyError: device: expected CuPy\nsee the FAQ: page"
    )
    assert brief(error) == (
        "steps of threads: expected an answer, got its end with status 1: [0/2] error before init: "
        "MissingDependencyError: device: expected CuPy"
    )
    assert brief(ValueError("n: expected 1, got 2")) == "n: expected 1, got 2"


def test_steps_are_held_against_those_of_processes():
    blocks = {"threads": SLOW, "processes": FAST, "torch DDP": []}
    costs = {"processes": {"start_seconds": 1.25, "host_bytes": 200 << 20, "device_bytes": 600 << 20}}
    about = {"processes": {"ranks": 2}}
    text = tables.steps_table(
        {
            "kind": "launch-bound", "workload": "mlp", "ranks": 2, "batch_per_rank": 128, "blocks": blocks,
            "refused": {"torch DDP": 4}, "costs": costs, "about": about,
        }
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[1].endswith("2000000 us, 0 blocks refused, 2.00 times [2.00, 2.00] that of processes")
    assert lines[2].endswith("1000000 us, 0 blocks refused") and lines[3].endswith(
        "(cores busy), 4 blocks refused"
    )
    assert (
        lines[4] == "  processes cost: first steps after 1.2 s, 100 MiB of host memory a rank, 300 of a GPU"
    )
