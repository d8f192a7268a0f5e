"""Run everything that needs several GPUs of one host, in time limits, and write a report as the results come.

    python scripts/multi_gpu_report.py --out docs/benchmarks/multi-gpu --run 1
    python scripts/multi_gpu_report.py --out docs/benchmarks/multi-gpu --run 2

Run 1 holds correctness, all-reduce and contention, run 2 training and placements; each ends within ``--seconds``
(default 590). The two share a folder: ``report-1.md``, ``report-2.md``, a ``.json`` a benchmark, and a ``.log`` a
command that failed. A command has a time limit of its own; what it leaves running is ended with its process group, and
the next command runs. The exit status is 1 if one failed or did not run.

It takes the GPUs that it finds: one rank a GPU for n = 2, 4, 8. ``--device cpu`` runs the same commands on ranks of the
CPU and ``--share 2`` on two ranks that share one GPU: both prove the script, not the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import mpdp

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "parallel" / "programs"
COMMAND = PROGRAMS / "command.py"
TORCH_MODES = "torch,torch-compile"
LEAST_SECONDS = 8  # a command that has less left is not started
GRACE_SECONDS = 5  # from the interrupt of a command to the end of its process group


@dataclass
class Command:
    """One command of the report.

    Attributes:
        name: of its files; title: what it shows.
        words: the command line.
        seconds: its time limit.
        environ: variables beside those of this process.
        table: lines of its output that go into the report: those of the last table; else the last line alone.
    """

    name: str
    title: str
    words: list[str]
    seconds: float
    environ: dict[str, str]
    table: bool = False


class Report:
    """The report of one run: runs commands one after another, and writes down what came of each.

    Args:
        path: of the report.
        seconds: in which all has to end.
        heading: the first lines.
    """

    def __init__(self, path: Path, seconds: float, heading: str) -> None:
        self.path, self.failed = path, 0
        self._ends = time.monotonic() + seconds
        self.path.write_text(heading + "\n", encoding="utf-8")

    def run(self, command: Command) -> None:
        """Run one command within its time limit, and note the end of its output."""
        left = self._ends - time.monotonic() - GRACE_SECONDS
        if left < LEAST_SECONDS:
            self._note(command, f"NOT RUN: {max(left, 0):.0f} s were left", "")
            self.failed += 1
            return
        start = time.monotonic()
        status, output = run_limited(command, min(command.seconds, left))
        taken = f"{time.monotonic() - start:.0f} s"
        if status == 0:
            self._note(command, f"done in {taken}", _excerpt(output, command.table))
            return
        self.failed += 1
        log = self.path.parent / f"{command.name}.log"
        log.write_text(output, encoding="utf-8")
        what = "CUT OFF" if status is None else f"FAILED with status {status}"
        self._note(command, f"{what} after {taken}, see {log.name}", "\n".join(output.splitlines()[-15:]))

    def _note(self, command: Command, what: str, body: str) -> None:
        text = f"\n## {command.title}\n\n`{_shown(command)}`: {what}.\n"
        if body:
            text += "\n" + "\n".join("    " + line for line in body.splitlines()) + "\n"
        print(f"{command.name}: {what}", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def run_limited(command: Command, seconds: float) -> tuple[int | None, str]:
    """Return exit status and output of a command; the status is None if it was cut off.

    Its process group gets an interrupt at the limit, and is killed a few seconds later and in any case at the end.
    """
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = subprocess.Popen(
        command.words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **command.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _signal(process.pid, signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            _signal(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return None, output
    finally:
        _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _excerpt(output: str, table: bool) -> str:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if " info " not in line and not line.startswith("mpdp run: ")]
    return "\n".join(lines[-60:] if table else lines[-1:])


def _shown(command: Command) -> str:
    words = [
        Path(word).name if word == sys.executable else word.replace(f"{ROOT}/", "") for word in command.words
    ]
    return " ".join([*(f"{k}={v}" for k, v in command.environ.items()), *words])


class Plan:
    """The commands of both runs for the devices at hand.

    Args:
        out: the folder for JSON.
        device: "cuda" or "cpu".
        sizes: numbers of ranks.
        shared: ranks share one GPU, which rules out NCCL.
        quick: short forms of the benchmarks, to prove the script.
        peers: PyTorch is at hand.
    """

    def __init__(
        self, out: Path, device: str, sizes: list[int], *, shared: bool, quick: bool, peers: bool
    ) -> None:
        self.out, self.device, self.sizes = out, device, sizes
        self.shared, self.quick, self.peers = shared, quick, peers

    def first(self) -> Iterator[Command]:
        """Correctness, all-reduce, contention."""
        yield from self._tests()
        yield from self._all_reduce()
        yield self._bench(
            "contention", "Threads or processes on all GPUs", 1, 150, ["contention"], table=True
        )

    def second(self) -> Iterator[Command]:
        """Weak scaling beside PyTorch, and placements."""
        workloads = ["mlp"] if self.device == "cpu" or self.quick else ["gpt2", "resnet50", "chargpt", "mlp"]
        for workload in workloads:
            for n in [1, *self.sizes]:
                words = ["train", workload]
                if self.peers and (n == 1 or n == self.sizes[-1]):
                    words += ["--peers", TORCH_MODES if workload in ("gpt2", "resnet50") else "torch"]
                yield self._bench(
                    f"train-{workload}-{n}", f"{workload}, {n} ranks", n, 75, words, seconds="0.5", table=True
                )
        if "resnet50" in workloads:
            n = self.sizes[-1]
            words = ["train", "resnet50", "--global-stats"]
            title = f"resnet50, statistics of the global batch, {n} ranks"
            yield self._bench(f"train-resnet50-global-{n}", title, n, 45, words, seconds="0.5", table=True)
        workload = "mlp" if self.device == "cpu" or self.quick else "gpt2"
        n = self.sizes[-1]
        title = f"Placements of {workload}, {n} ranks"
        yield self._bench(f"placements-{workload}-{n}", title, n, 90, ["placements", workload], table=True)

    def _tests(self) -> Iterator[Command]:
        if self.device == "cpu":
            programs = [("semantics.py", [], "shared_memory"), ("graphs.py", ["cpu"], "shared_memory")]
            programs += [("semantics.py", [], "mpi"), ("graphs.py", ["cpu"], "mpi")]
        else:
            transports = ["cuda_ipc", "staged"] + ([] if self.shared else ["nccl"])
            programs = [("gpu_twins.py", [], transport) for transport in transports]
            programs += [("graphs.py", ["cuda"], transport) for transport in transports]
            programs += [("cuda_ipc.py", [], transport) for transport in transports if transport != "staged"]
            programs += [
                ("captured.py", [transport], transport) for transport in transports if transport != "staged"
            ]
        for n in self.sizes:
            for program, words, transport in programs:
                stem = program.removesuffix(".py")
                yield Command(
                    f"test-{stem}-{transport}-{n}",
                    f"{stem} over {transport}, {n} ranks",
                    self._started(n, PROGRAMS / program, words),
                    60,
                    {"MPDP_TRANSPORT": transport},
                )
            if self.device == "cuda" and n > 2:
                yield Command(
                    f"test-gpu_twins-two_level-{n}",
                    f"gpu_twins over staged(two_level), two declared nodes, {n} ranks",
                    self._started(n, PROGRAMS / "gpu_twins.py", []),
                    60,
                    {"MPDP_TRANSPORT": "staged", "MPDP_NODES": "2"},
                )
        if self.device == "cuda":
            files = ["tests/parallel/test_exactness.py", "tests/parallel/test_gpu.py"]
            words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "gpu"]
            yield Command("test-exactness", "Ranks on GPUs equal a plain loop", words, 120, {})

    def _all_reduce(self) -> Iterator[Command]:
        if self.device == "cpu":
            sizes, transports = "4K,1M", "shared_memory,mpi4py"
        else:
            sizes = "4K,1M" if self.quick else "4K,64K,1M,16M,128M,1G"
            transports = "cuda_ipc" if self.shared else "cuda_ipc,nccl" + (",torch" if self.peers else "")
        for n in self.sizes:
            for dtype in ("bfloat16", "float32"):
                words = ["all-reduce", "--sizes", sizes, "--dtypes", dtype, "--transports", transports]
                name = f"all-reduce-{dtype}-{n}"
                yield self._bench(name, f"All-reduce of {dtype}, {n} ranks", n, 60, words, table=True)

    def _bench(
        self,
        name: str,
        title: str,
        n: int,
        limit: float,
        words: list[str],
        *,
        seconds: str | None = None,
        table: bool,
    ) -> Command:
        options = ["--device", self.device, "--json", str(self.out / f"{name}.json")]
        if self.quick:
            options.append("--quick")
        if seconds is not None:
            options += ["--seconds", "0.1" if self.quick else seconds]
        whole = ["bench", *words, *options]
        started = [sys.executable, "-m", "mpdp", *whole] if n == 1 else self._started(n, COMMAND, whole)
        return Command(name, title, started, limit, {}, table)

    def _started(self, n: int, program: Path, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "mpdp", "run", "-n", str(n), str(program), *words]


def heading(run: int, devices: list[str], sizes: list[int]) -> str:
    """Return the first lines of a report: what runs where."""
    command = " ".join(["python", "scripts/multi_gpu_report.py", *sys.argv[1:]])
    versions = f"mpdp {mpdp.__version__}, Python {sys.version.split()[0]}"
    lines = [
        f"# Several GPUs of one host, run {run}",
        "",
        f"Command: `{command}`, {date.today()}, {versions}; ranks: {', '.join(map(str, sizes))}.",
        "",
        *(f"- {device}" for device in devices),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report and its files")
    parser.add_argument("--run", type=int, choices=(1, 2), required=True)
    parser.add_argument("--seconds", type=float, default=590, help="in which it ends (default: 590)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--share", type=int, help="ranks that share one GPU; short forms of the benchmarks")
    parser.add_argument("--quick", action="store_true", help="short forms of the benchmarks")
    parser.add_argument("--only", default="", help="run the commands alone whose names hold this text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = [] if options.device == "cpu" else mpdp.devices()
    if options.device == "cpu":
        names, sizes = ["the CPU alone: this proves the script"], [2]
    elif options.share:
        names, sizes = [f"{found[0].name}, shared by all ranks: this proves the script"], [options.share]
    else:
        names = [f"GPU {gpu.device.ordinal}: {gpu.name}" for gpu in found]
        sizes = [n for n in (2, 4, 8) if n <= len(found)]
        if not sizes:
            parser.error(
                f"expected several GPUs, got {len(found)}; --share 2 or --device cpu prove the script"
            )
    quick = options.quick or bool(options.share) or options.device == "cpu"
    plan = Plan(
        options.out.resolve(),
        options.device,
        sizes,
        shared=bool(options.share),
        quick=quick,
        peers=_has_torch() and options.device == "cuda" and not options.share,
    )
    report = Report(
        options.out / f"report-{options.run}.md", options.seconds, heading(options.run, names, sizes)
    )
    for command in plan.first() if options.run == 1 else plan.second():
        if options.only in command.name:
            report.run(command)
    return int(report.failed > 0)


def _has_torch() -> bool:
    """Return whether this Python has PyTorch, without importing it here."""
    words = [
        sys.executable,
        "-c",
        "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)",
    ]
    return shutil.which(sys.executable) is not None and subprocess.run(words, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
