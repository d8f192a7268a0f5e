"""Public reports of faults in other trainers, each as a small test; the docstrings name the reports' ids.

What the programs train is tiny. Reports that other tests hold: A4, C7 and E5 in test_disagreement; B1, B2, B4, B6, B8,
B9, C1, C10, E1 and E3 in test_semantics; C4, D2, D4, D6 and D12 in test_checkpoints; F3 and H3 in test_collectives; F4
in unit/nn/test_normalisation; G1 in test_batch_norm; H2 in test_memory; I2 wherever more ranks than cores are started;
K2 in unit/training/test_trainer.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time

import launching
import numpy as np
import pytest
from launching import PROGRAMS

import mpdp
import mpdp.threads
from mpdp import nn, optim
from mpdp.training import checkpoint

FAILURES = PROGRAMS / "reports_failures.py"
CHECKPOINTS = PROGRAMS / "reports_checkpoints.py"
TRAINING = PROGRAMS / "reports_training.py"
REPORT = re.compile(r"^\[\d+/\d+\] error ", re.MULTILINE)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def ends(result, pattern, within=20.0):
    """Check that a job failed soon and said why, once and by the rank where it happened."""
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    assert result.seconds < within, result
    assert re.search(pattern, result.output, re.MULTILINE), f"no {pattern} in {result}"
    assert len(REPORT.findall(result.output)) <= 1, result
    return result


def newest(run):
    found, reasons = checkpoint.newest(run / "checkpoints")
    assert found is not None, reasons
    return found


@pytest.mark.parametrize(
    ("kind", "n", "form", "where", "error"),
    [
        ("getitem", 2, "mpirun", "in step 3", "a bad sample"),
        ("getitem", 4, "mpdp run", "in step 3", "a bad sample"),
        ("constructor", 3, "mpirun", "before init", "a bad width"),
        ("callback", 2, "mpdp run", "in step 3", "a bad callback"),
        ("evaluation", 3, "mpirun", "in step 5", "a bad sample"),
        ("before_trainer", 2, "mpirun", "in step 0", "a bad setting"),
    ],
)
def test_one_rank_raises(job, tmp_path, kind, n, form, where, error):
    """A1; A9 (the loader's thread raises on one rank)."""
    result = job(FAILURES, kind, tmp_path, n=n, form=form)
    ends(result, rf"^\[{n - 1}/{n}\] error {where}: ValueError: {error}$")
    assert result.output.count("Traceback (most recent call last)") == 1, result
    if kind == "getitem":
        assert f"while loading sample 31 (rank {n - 1}, epoch 0, update 3)" in result.output


def test_clean_up_that_waits_for_others_neither_hangs_nor_hides_the_error(job, tmp_path):
    """A2: save in finally, evaluate in a with block, barrier in on_epoch and at exit; A1 with save_every."""
    result = ends(job(FAILURES, "clean_up", tmp_path), r"^\[1/2\] error in step 3: ValueError: a bad sample$")
    assert result.output.count("Traceback (most recent call last)") == 1, result
    assert newest(tmp_path / "run")[0].step == 3


def test_the_traceback_survives_a_pipe(tmp_path):
    """K3: the failing rank's own, although only rank 0 logs."""
    if launching.mpi() is None:
        pytest.skip("no MPI")
    line, settings = launching.mpirun(3)
    words = ["sh", "-c", '{ "$@"; echo "status $?"; } 2>&1 | cat', "sh", *line, sys.executable]
    result = launching.run([*words, str(FAILURES), "getitem", str(tmp_path)], environ=settings)
    assert result.output.count("Traceback (most recent call last)") == 1, result
    assert "[2/3] error in step 3: ValueError: a bad sample" in result.output
    assert re.search(r"status [1-9]", result.output) and not result.orphans


def test_a_data_file_vanishes(job, tmp_path):
    """A3: FileNotFoundError names file and rank, and the last checkpoint is good."""
    result = job(FAILURES, "vanished_file", tmp_path, n=3)
    ends(result, r"^\[1/3\] error in step \d+: FileNotFoundError: .*files/3\.npy'$")
    assert re.search(r"while loading sample 3 \(rank 1, epoch [1-4], update \d+\)", result.output), result
    assert newest(tmp_path / "run")[0].step >= 5


LEFT = r"^\[0/{n}\] error in step 2: rank {last} left while rank 0 is in step 2 \("
# An MPI whose launcher ends the survivors first leaves the word to `mpdp run`.
DIED = r"^\[\d/{n}\] error in step 2: rank {last} died: its process ended without a word|^mpdp run: .*did not finish"


@pytest.mark.parametrize(
    ("kind", "n", "form", "pattern"),
    [
        ("return", 2, "mpirun", LEFT),
        ("exit_3", 2, "mpdp run", LEFT),
        ("os_exit_0", 2, "mpdp run", DIED),
        ("kill", 3, "mpdp run", DIED),
    ],
    ids=["return", "exit_3", "os_exit_0", "kill"],
)
def test_one_rank_leaves_its_own_loop(job, tmp_path, kind, n, form, pattern):
    """A5, and nobody reports a finished run."""
    result = job(FAILURES, kind, tmp_path, n=n, form=form)
    ends(result, pattern.format(n=n, last=n - 1))
    assert not any(rank in result.values for rank in range(n - 1)), result


def test_ranks_with_unequal_numbers_of_batches(job, tmp_path):
    """E1: all ranks are told where the others are; empty batches in their place are in reports_training."""
    result = job(FAILURES, "uneven", tmp_path)
    ends(
        result,
        r"error in step 3: DisagreementError: evaluate\(\): expected every rank to call it at the same step",
    )
    places = r"got rank 0 in .*step.* at step 3; rank 1 in evaluate\(\) at step 3"
    assert re.search(places, result.output), result


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("caught_in_step", r"^\[1/2\] error in step 2: MemoryError: no room for this batch$"),
        ("out_of_memory", r"^\[0/2\] error in step 4: rank 1 left while rank 0 is in step 4 \("),
    ],
    ids=["in the trainer", "in an own loop"],
)
def test_a_program_catches_an_error_of_its_step_on_one_rank(job, tmp_path, kind, pattern):
    """A7: inside the trainer it ends the job all the same; around DataParallel the missing step is noticed."""
    ends(job(FAILURES, kind, tmp_path), pattern)


def test_a_run_killed_in_the_middle_of_a_save_goes_on_from_the_checkpoint_before(job, tmp_path):
    """D1; K1: one line an epoch and one log, whatever the number of ranks; a warning once."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    ends(
        job(FAILURES, "killed_save", killed, form="mpdp run"), r"error in step 3: rank 0 died|did not finish"
    )
    assert any(path.name.startswith(".tmp-") for path in (killed / "run" / "checkpoints").iterdir())
    assert newest(killed / "run")[0].step == 2
    job(FAILURES, "unharmed", killed, environ={"RESUMED": "1"}).check()
    result = job(FAILURES, "unharmed", whole).check()
    assert np.array_equal(np.load(killed / "weights.npy"), np.load(whole / "weights.npy"))
    assert result.values == {0: 10, 1: 10}
    assert result.output.count(" epoch 1 ") == result.output.count("cast from float64") == 1, result
    assert not [path for path in (killed / "run" / "checkpoints").iterdir() if path.name.startswith(".tmp-")]
    for run in (killed / "run", whole / "run"):
        log = (run / "log.jsonl").read_text().splitlines()
        assert sum('"kind": "step"' in row for row in log) == 10
        assert {path.name for path in run.iterdir()} == {"log.jsonl", "config.json", "checkpoints", "lock"}


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """D1: thirty times, at random moments; what is found was written, to the bit."""
    random = np.random.default_rng(time.time_ns())
    for _ in range(30):
        child = os.fork()
        if child == 0:
            found, _ = checkpoint.newest(tmp_path)
            step = 0 if found is None else found[0].step
            while True:
                step += 1
                checkpoint.write(tmp_path, step, {"a": np.full((50, 50), step)}, {"step": step})
                checkpoint.prune(tmp_path, 2)
        before, deadline = set(os.listdir(tmp_path)), time.monotonic() + 20
        # Until it has saved once, however slow the disk is.
        while not any(name.startswith("step-") for name in set(os.listdir(tmp_path)) - before):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, 9)
        os.waitpid(child, 0)
        found, reasons = checkpoint.newest(tmp_path)
        assert reasons == [], reasons
        if found is not None:
            assert np.all(found[1]["a"] == found[0].step) and found[0].state == {"step": found[0].step}
    assert found is not None


@pytest.mark.parametrize("n", [1, 2, 3])
def test_checkpoints(job, tmp_path, n):
    """A8, C4, D1, D6, D7, D8, D9, D10 and D11; see programs/reports_checkpoints.py."""
    job(CHECKPOINTS, tmp_path, n=n).check()
    # In a C locale, since paths may come in any encoding (K5).
    result = job(CHECKPOINTS, tmp_path, "load", n=n, timeout=60, environ=ASCII if n == 2 else None).check()
    assert result.output.count("passed over a checkpoint: ") == 12, result
    assert result.results == [7] * n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_training(job, n):
    """B7, B11, E1, E4, E7, F1, L1, L2, L3, M1, M2, M3 and M6; see programs/reports_training.py."""
    result = job(TRAINING, n=n, timeout=60).check()
    assert len(result.results) == n and all(len(passed) == 13 for passed, _ in result.results), result
    assert len({digest for _, digest in result.results}) == 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_state(job, tmp_path, n):
    """C6, D5, E8, G4, J4 and M1; see programs/reports_state.py."""
    result = job(PROGRAMS / "reports_state.py", tmp_path, n=n, timeout=60).check()
    assert len(result.results) == n and all(len(passed) == 6 for passed in result.results), result


def test_replicas_in_threads_with_fewer_samples_than_replicas():
    """M4: a batch that the number of replicas does not divide, or smaller than it; dicts and rows of unequal length."""
    random = np.random.default_rng(0)
    rows = [random.standard_normal(6).astype("float32") for _ in range(10)]

    class Rows:
        def __len__(self):
            return len(rows)

        def __getitem__(self, i):
            return {"x": rows[i], "length": 1 + i % 6, "target": np.float32(i)}

    class Masked(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(6, 1)

        def forward(self, x, length):
            return self.linear(x * (np.arange(6) < length[:, None]).astype("float32")).reshape(len(x))

    def train():
        run = mpdp.Trainer(Masked(), lambda o, t: ((o - t) * (o - t)).mean(), optim.SGD(lr=0.01))
        losses = [
            run.fit(Rows(), epochs=e, global_batch_size=b)[-1]["loss"] for e, b in ((1, 10), (2, 3), (3, 1))
        ]
        return np.append(run.parallel.weights, losses), run.predict(Rows())

    mpdp.seed(0)
    expected, outputs = train()
    for values, predicted in mpdp.threads.run(train, 4):
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(predicted, outputs, rtol=1e-5, atol=1e-6)


def test_a_run_repeats_in_another_process(job):
    """L2: whatever the hash seed, with two BLAS threads."""
    digests = set()
    for seed in ("1", "2"):
        environ = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "2"}
        result = job(
            TRAINING, "results_repeat_and_depend_on_chunks_by_rounding_alone", environ=environ
        ).check()
        digests |= {digest for _, digest in result.results}
    assert len(digests) == 1 and None not in digests


def in_mount(options, folder, *words, after="true"):
    """Run a command with a file system of its own at ``folder``, which nobody else sees; skip without the right."""
    if shutil.which("unshare") is None or launching.run(["unshare", "-m", "true"]).rc != 0:
        pytest.skip("no right to mount a file system")
    if launching.mpi() is None:
        pytest.skip("no MPI")
    line, settings = launching.mpirun(2)
    text = f'mount -t tmpfs -o {options} none {folder} || exit 0; "$@"; status=$?; {after}; exit $status'
    words = ["unshare", "-m", "sh", "-c", text, "sh", *line, sys.executable, *map(str, words)]
    return launching.run(words, environ=settings)


def test_a_full_disk(tmp_path):
    """D1: on a file system of 200 KiB."""
    kept = tmp_path / "kept"
    disk = tmp_path / "disk"
    disk.mkdir()
    result = in_mount("size=200k", disk, FAILURES, "full_disk", disk, after=f"cp -r {disk} {kept}")
    ends(
        result, r"error in step \d+: CheckpointError: checkpoint: expected to write .*No space left on device"
    )
    assert "free or mend the disk (on rank 0 of 2)" in result.output
    step = int(re.search(r"error in step (\d+)", result.output)[1])
    assert newest(kept / "run")[0].step == step - 1 > 2
    assert not [path for path in (kept / "run" / "checkpoints").iterdir() if path.name.startswith(".tmp-")]


def test_a_run_folder_that_cannot_be_written(job, tmp_path):
    """D14: one error on all ranks before the first step; chmod does not stop root."""
    file = tmp_path / "file"
    file.write_text("")
    sentence = (
        r"error in step 0: OSError: run_dir: expected a folder that can be written, got .*; choose another"
    )
    result = ends(job(FAILURES, "read_only", file, n=3), sentence, within=10)
    assert "(on rank 0 of 3) (on all ranks)" in result.output
    disk = tmp_path / "disk"
    disk.mkdir()
    ends(in_mount("ro", disk, FAILURES, "read_only", disk), sentence, within=10)


SOLO = """
import numpy as np, mpdp
from mpdp import data, nn, optim
trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
trainer.fit(data.ArrayDataset(np.ones((8, 4), "float32"), np.zeros(8, int)), epochs=2, global_batch_size=4)
from launching import record
record(trainer.world.size)
"""


@pytest.fixture
def solo(tmp_path):
    script = tmp_path / "solo.py"
    script.write_text(SOLO)
    return script


@pytest.mark.parametrize(
    ("left_over", "named"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8, SLURM_PROCID=0"),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "WORLD_SIZE=8, RANK=3"),
    ],
)
def test_variables_left_over_from_another_launcher(job, solo, left_over, named):
    """I6: one process, one warning, no wait."""
    result = job(solo, n=1, form="python", environ=left_over).check()
    assert result.values == {0: 1}
    assert result.output.count("warning") == 1 and f"init: found {named} but no MPI launcher" in result.output


def test_threads_are_capped_by_what_mpi_says_of_the_node(job):
    """I7: a launcher that does not say how many ranks the node has, as Slurm's."""
    result = job(PROGRAMS / "unannounced.py", n=2, environ={"OMP_NUM_THREADS": None}).check()
    for local_size, threads, cap in result.results:
        assert (local_size, threads) == (2, cap)


@pytest.mark.parametrize("threads", [None, "4"])
def test_what_a_rank_may_run_on_is_said(job, threads):
    """I7: cores in reach and BLAS threads in the first line; a warning where threads fight for cores."""
    n = 2
    result = job(PROGRAMS / "reports_threads.py", n=n, environ={"OMP_NUM_THREADS": threads}).check()
    for seen in result.results:
        assert seen["cores"] <= seen["bound"]
        if threads is None:
            assert seen["threads"] == max(1, min(seen["cores"], seen["node"] // n))
        else:  # the user's word stands; some BLAS go no further than the node's cores
            assert seen["threads"] in (int(threads), seen["node"])
    first = result.values[0]
    assert re.search(
        rf"{first['cores']} cores? in reach of a rank, {first['threads']} BLAS threads?", result.output
    )
    crowded = first["threads"] * n > first["node"] and first["threads"] > 1
    assert crowded == (f"BLAS threads x {n} ranks on a node of" in result.output), result


def test_pools_of_worker_processes(job):
    """I8: fork, spawn and forkserver in a user's script, which calls init at its top level."""
    result = job(PROGRAMS / "reports_pools.py", n=2, timeout=60).check()
    assert result.output.count("finished") == 2
    assert result.output.count("world of 2 ranks") == 1 and "error" not in result.output, result


@pytest.mark.parametrize("missing", ["mpi4py", "libmpi"])
def test_without_mpi(job, solo, tmp_path, missing):
    """I10: import, help and one process work; under a launcher the missing thing is named."""
    if missing == "mpi4py":
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n"
        )
        path = [str(tmp_path), str(launching.ROOT), str(launching.ROOT / "tests")]
        environ = {"PYTHONPATH": os.pathsep.join(path)}
        sentence = "mpi4py: expected it under a launcher, got No module named 'mpi4py'; install it with: pip"
    else:
        environ = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
        sentence = (
            r"MPI: expected a library \(libmpi.so, .*\) under a launcher, got .*; install one with: pip"
        )
    assert job(solo, n=1, form="python", environ=environ).check().values == {0: 1}
    assert (
        "usage: mpdp"
        in launching.run([sys.executable, "-m", "mpdp", "--help"], environ=environ).check().output
    )
    result = job(solo, n=2, environ=environ)
    assert result.rc != 0 and not result.timed_out and not result.values, result
    assert re.search(rf"^\[\d/2\] error before init: \w+: {sentence}", result.output, re.MULTILINE), result


@pytest.mark.parametrize(
    ("environ", "redirection"),
    [(ASCII, ""), ({}, ">&- 2>&-"), ({}, ">/dev/full 2>/dev/full")],
    ids=["ascii", "closed", "full"],
)
def test_output_that_cannot_be_written_stops_no_training(solo, environ, redirection):
    """K5."""
    if launching.mpi() is None:
        pytest.skip("no MPI")
    line, settings = launching.mpirun(2)
    words = [*line, "sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, str(solo)]
    result = launching.run(words, environ={**settings, **environ}).check()
    assert result.values == {0: 2, 1: 2}


def test_a_bar_on_an_ascii_terminal(solo):
    """K5: the bar itself, on a terminal of its own."""
    program = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    words = ["sh", "-c", 'stty rows 24 cols 80; exec "$@"', "sh", sys.executable, str(solo)]
    result = launching.run([sys.executable, "-c", program, *words], environ=ASCII).check()
    assert re.search(r"100%\|#+\| 4/4 ", result.output) and result.output.isascii(), result
