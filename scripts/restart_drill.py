"""Restart drill: kill a run at random moments, let `mpdp run --max-restarts` bring it back, compare with a quiet run.

    python scripts/restart_drill.py [-n 2] [--kills 10] [--max-restarts 20] [--seed S] [--json PATH]

Both runs train the same small network. In the drill a moment comes when an update drawn at random is done: a little
later one rank, all ranks or mpirun are killed, or one rank gets SIGTERM; now and then it is while ranks are starting.
The status is 0 if the job came to its end after all these kills with the bits of the quiet run, in weights and moments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UPDATES, SAVE_EVERY = 400, 25
KINDS = ("kill one rank", "kill all ranks", "kill mpirun", "terminate one rank")


def train(folder: Path) -> None:
    """Be one rank of a run."""
    import mpdp
    from mpdp.launch import announced

    announcement = announced(os.environ)
    rank = 0 if announcement is None else announcement.rank
    restart = os.environ["MPDP_RESTART"]
    write(folder / f"started.{restart}.{rank}", str(os.getpid()))
    import numpy as np

    from mpdp import data, nn, optim

    class Told(mpdp.Callback):
        def on_step(self, trainer: mpdp.Trainer) -> None:
            if rank == 0:
                write(folder / "progress", f"{restart} {trainer.step_count}")
            time.sleep(0.004)  # long enough for a kill to hit any part of a step

    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 20)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int64")
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(lr=1e-2),
        world=mpdp.init(device="cpu"),
        schedule=optim.WarmupCosine(20, UPDATES),
        run_dir=folder / "run",
        save_every=SAVE_EVERY,
        callbacks=[Told()],
    )
    trainer.resume()
    trainer.fit(data.ArrayDataset(x, y), updates=UPDATES, global_batch_size=64, progress=False)
    if rank == 0:
        parts = [trainer.parallel.weights, *trainer.optimizer.state.values()]
        np.save(folder / "final.npy", np.concatenate(parts))


def write(path: Path, text: str) -> None:
    """Write a small file at once."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


class Drill:
    """Kills at random what `mpdp run` has started.

    Args:
        folder: where the ranks say how far they are.
        n: ranks.
        kills: how many; each ends one start.
        seed: of the choices.
    """

    def __init__(self, folder: Path, n: int, kills: int, seed: int) -> None:
        self.folder, self.n, self.kills = folder, n, kills
        self.random = random.Random(seed)
        self.done: list[dict[str, object]] = []

    def run(self, process: subprocess.Popen[bytes]) -> None:
        """Do all kills, or as many as the job lives for."""
        targets = sorted(self.random.randrange(1, UPDATES - 10) for _ in range(self.kills))
        early = False
        for restart, target in enumerate(targets):
            early = (
                not early and self.random.random() < 0.2
            )  # never twice in a row: three such starts are given up
            pids = self.wait(process, lambda restart=restart: self.started(restart))
            if not early:
                at = (restart, target)
                self.wait(process, lambda at=at: self.progress() >= at or None)
            time.sleep(self.random.uniform(0, 0.02))
            if pids is None or process.poll() is not None:
                return
            kind = self.random.choice(KINDS if not early else KINDS[:3])
            self.kill(kind, pids, process.pid)
            self.done.append({"kind": kind, "while": "starting" if early else f"update {self.progress()[1]}"})

    def started(self, restart: int) -> list[int] | None:
        """Return the processes of a start once they are all there."""
        files = [self.folder / f"started.{restart}.{rank}" for rank in range(self.n)]
        return [int(file.read_text()) for file in files] if all(file.exists() for file in files) else None

    def progress(self) -> tuple[int, int]:
        """Return the last update that was told, as (restart, update)."""
        try:
            restart, step = (self.folder / "progress").read_text().split()
        except OSError:
            return (-1, 0)
        return int(restart), int(step)

    def wait(self, process: subprocess.Popen[bytes], look):
        """Return what ``look`` finds, or None when the job has ended."""
        while process.poll() is None:
            found = look()
            if found is not None:
                return found
            time.sleep(0.005)
        return None

    def kill(self, kind: str, pids: list[int], parent: int) -> None:
        """Do it."""
        if kind == "kill mpirun":
            pids = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        elif kind != "kill all ranks":
            pids = [self.random.choice(pids)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if kind == "terminate one rank" else signal.SIGKILL)


def job(folder: Path, n: int, most: int) -> subprocess.Popen[bytes]:
    """Start the run."""
    flags = ["-n", str(n), *(["--max-restarts", str(most)] if most else [])]
    words = [sys.executable, "-m", "mpdp", "run", *flags, __file__, "--train", str(folder)]
    return subprocess.Popen(words, start_new_session=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--max-restarts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the choices (default: another each time)")
    parser.add_argument("--json", metavar="PATH", default=None, help="write one JSON object; - is stdout")
    parser.add_argument("--train", metavar="FOLDER", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return 0
    seed = random.randrange(10**6) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="mpdp-drill-") as text:
        quiet, disturbed = Path(text, "quiet"), Path(text, "disturbed")
        for folder in (quiet, disturbed):
            folder.mkdir()
        if job(quiet, options.n, 0).wait() != 0:
            raise SystemExit("the quiet run has failed; see above")
        begin = time.monotonic()
        process = job(disturbed, options.n, options.max_restarts)
        drill = Drill(disturbed, options.n, options.kills, seed)
        try:
            drill.run(process)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        results = [folder / "final.npy" for folder in (quiet, disturbed)]
        same = status == 0 and results[0].read_bytes() == results[1].read_bytes()
    report = {
        "ranks": options.n,
        "updates": UPDATES,
        "save_every": SAVE_EVERY,
        "seed": seed,
        "kills": drill.done,
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "same_bits": same,
    }
    for number, kill in enumerate(drill.done, 1):
        print(f"{number:3d}  {kill['kind']:20s} {kill['while']}", file=sys.stderr)
    verdict = "the bits of the quiet run" if same else "NOT the bits of the quiet run"
    print(f"{len(drill.done)} kills, status {status}, {verdict} (seed {seed})", file=sys.stderr)
    if options.json is not None:
        line = json.dumps(report, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(line)
        else:
            Path(options.json).write_text(line)
    return 0 if same and len(drill.done) == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
