"""Measure what the core promises on CPU ranks, in alternating runs, and write one JSON object.

    python scripts/measure_core.py --json docs/benchmarks/core.json [--torch-python PATH] [--rounds 5]

It measures: ``mlp`` at 1 and 2 ranks (and PyTorch's DistributedDataParallel where an interpreter with torch is
named), the trainer at one rank against a plain NumPy loop in the same process, and the host memory that data
parallelism adds to a rank. One BLAS thread a rank everywhere. Needs an MPI, as ``mpdp run`` finds it.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mpdp.comm.tuned import processor

ELEMENTS = 24_000_000  # of the model whose memory is measured: 96 MB of float32


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="-", help="file to write; - is stdout")
    parser.add_argument("--torch-python", default=None, help="an interpreter that has PyTorch")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--part", choices=["loop", "memory", "bench"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.part is not None:
        parts = {
            "loop": compare_with_plain_loop,
            "memory": memory_of_a_rank,
            "bench": lambda: bench_step(arguments.torch_python),
        }
        value = parts[arguments.part]()
        if value is not None:
            print(json.dumps(value), flush=True)
        return
    result = {
        "command": " ".join(["python", "scripts/measure_core.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    rows = {}
    for _ in range(arguments.rounds):
        for ranks in (2, 1):
            words = ["--torch-python", arguments.torch_python] if arguments.torch_python else []
            for name, rate in own("bench", ranks, *words).items():
                rows.setdefault(f"{name} n={ranks}", []).append(rate)
    result["mlp_samples_per_second"] = {
        name: {"median": statistics.median(rates), "runs": rates} for name, rates in rows.items()
    }
    if arguments.torch_python:
        pairs = [a / b for a, b in zip(rows["mpdp n=2"], rows["torch n=2"])]
        result["mpdp over torch at n=2"] = {"median": statistics.median(pairs), "runs": pairs}
    result["trainer over plain loop at n=1"] = own("loop", 1)
    one, two = own("memory", 1), own("memory", 2)
    result["memory"] = {
        "elements": ELEMENTS,
        "peak_rss_bytes n=1": one,
        "peak_rss_bytes n=2": two,
        "extra_bytes": two - one,
        "two_chunks_bytes": 2 * (16 << 20),
    }
    text = json.dumps(result, indent=1)
    if arguments.json == "-":
        print(text)
    else:
        Path(arguments.json).write_text(text + "\n")


def launched(ranks, *words):
    """Run one of our jobs under mpirun and return the last line of its output."""
    line = [sys.executable, "-m", "mpdp", "run", "-n", str(ranks), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.strip().splitlines()[-1])


def bench_step(torch_python):
    """Return samples per second as ``mpdp bench train mlp`` measures them, of both in one alternating run."""
    import mpdp
    from mpdp.bench.train import Plan, measure

    world = mpdp.init()
    plan = Plan(peers=("torch",) if torch_python else (), peer_python=torch_python)
    result = measure(world, "mlp", plan=plan)
    return {row["name"]: row["items_per_second"] for row in result["sides"]} if world.rank == 0 else None


def own(part, ranks, *words):
    """Run a part of this script as ``ranks`` ranks."""
    return launched(ranks, __file__, "--part", part, *words)


def compare_with_plain_loop():
    """Return the time of the trainer's step over that of a plain NumPy loop, blocks alternating in one process."""
    import mpdp
    from mpdp.bench.workloads import build

    world = mpdp.init()
    workload = build("mlp", world.rank)
    trainer = mpdp.Trainer(workload.model, workload.loss, workload.optimizer, world=world)
    plain = plain_loop([p.data.copy() for p in workload.model.parameters()], *workload.batch)
    calls = {"trainer": lambda: trainer.step(workload.batch), "plain": plain}
    times = {name: [] for name in calls}
    for turn in range(22):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(25):
                call()
            if turn > 1:
                times[name].append((time.perf_counter() - start) / 25 * 1e6)
    ratios = [a / b for a, b in zip(times["trainer"], times["plain"])]
    return {
        "trainer_us": statistics.median(times["trainer"]),
        "plain_us": statistics.median(times["plain"]),
        "median of paired ratios": statistics.median(ratios),
    }


def plain_loop(params, x, y):
    """Return a function that does one step of the same model, written by hand."""
    w1, b1, w2, b2, w3, b3 = params
    grads, velocity = [np.empty_like(p) for p in params], [np.zeros_like(p) for p in params]
    rows = np.arange(len(y))

    def step():
        h1 = x @ w1.T
        h1 += b1
        np.maximum(h1, 0, out=h1)
        h2 = h1 @ w2.T
        h2 += b2
        np.maximum(h2, 0, out=h2)
        z = h2 @ w3.T
        z += b3
        z -= z.max(axis=1, keepdims=True)
        e = np.exp(z)
        s = e.sum(axis=1, keepdims=True)
        loss = float((np.log(s[:, 0]) - z[rows, y]).mean())
        e /= s
        e[rows, y] -= 1
        e /= len(y)
        np.matmul(e.T, h2, out=grads[4])
        e.sum(axis=0, out=grads[5])
        g = e @ w3
        g *= h2 > 0
        np.matmul(g.T, h1, out=grads[2])
        g.sum(axis=0, out=grads[3])
        g = g @ w2
        g *= h1 > 0
        np.matmul(g.T, x, out=grads[0])
        g.sum(axis=0, out=grads[1])
        for p, v, gradient in zip(params, velocity, grads):
            v *= 0.9
            v += gradient
            p -= 0.01 * v
        return loss

    return step


def memory_of_a_rank():
    """Return the peak resident memory of a rank that trains a model of ELEMENTS parameters, the largest over ranks."""
    import mpdp
    from mpdp import nn, optim

    world = mpdp.init()
    width = 4096
    model = nn.Sequential(
        nn.Linear(width, ELEMENTS // (2 * width)), nn.ReLU(), nn.Linear(ELEMENTS // (2 * width), width)
    )
    trainer = mpdp.Trainer(model, nn.mse, optim.SGD(lr=1e-3, momentum=0.9), world=world)
    x = np.ones((4, width), dtype=np.float32)
    for _ in range(3):
        trainer.step((x, x))
    peak = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024], dtype=np.int64)
    world.comm.all_reduce(peak, op="max")
    return int(peak[0]) if world.rank == 0 else None


if __name__ == "__main__":
    main()
