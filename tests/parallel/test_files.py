"""Run folders with odd names work; one that cannot be written is one error on all ranks, at the start if possible."""

import os
import time

import pytest
from launching import PROGRAMS

from mpdp.training import run_lock


@pytest.mark.parametrize("n", [1, 3])
def test_odd_folders(job, tmp_path, n):
    result = job(PROGRAMS / "odd_folders.py", tmp_path, n=n, timeout=90).check()
    assert len(result.results) == n and all(found == result.results[0] for found in result.results)
    names, refused, vanished = result.results[0]
    assert len(names) == 9 and all(found == [True, True] for found in names.values()), names
    for what, found in refused.items():
        kind, message, steps = found
        assert kind == "OSError" and steps == 0, (what, found)
        assert message.startswith("run_dir: expected a folder that can be written, got "), (what, message)
        assert "; choose another one or mend it" in message
    kind, message, steps = vanished
    assert kind == "CheckpointError" and steps == 4 and "vanishing" in message, vanished
    assert "free or mend the disk" in message


def test_a_script_with_an_odd_name_and_odd_arguments(job, tmp_path):
    """What a shell, an MPI and a log may trip over: quotes, a line break, bytes that are no text, nothing at all."""
    script = os.path.join(os.fsencode(tmp_path), b"a 'b' \"c\"\n$(d) %s;&|* \xff.py")
    with open(script, "wb") as file:
        file.write(b"import sys, mpdp\nfrom launching import record\nmpdp.init()\nrecord(sys.argv[1:])\n")
    arguments = ["x y", "l1\nl2", os.fsdecode(b"\xff"), "", "-n", "'"]
    result = job(os.fsdecode(script), *arguments, n=2, form="mpdp run").check()
    assert result.results == [arguments] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_folder_where_another_job_writes_is_refused_on_every_rank_until_that_is_gone(job, tmp_path, n):
    run, word = tmp_path / "run", tmp_path / "refused"
    run.mkdir()
    held = [run_lock.take(run)]  # this process stands for the other job

    def give_way(process):
        deadline = time.monotonic() + 40
        while not word.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        held.clear()
        word.unlink(missing_ok=True)

    result = job(PROGRAMS / "run_lock.py", run, word, n=n, timeout=60, after=give_way).check()
    assert len(result.results) == n
    for seen, steps, text in result.results:
        assert len(seen) == 2 and steps == 1
        assert text.startswith("process ") and f"process {os.getpid()} " not in text
        for message, steps_then, agreed in seen:
            expected = f"run_dir: expected a folder where no other job writes, got {run} where another running job does"
            assert message.startswith(f"{expected} (process {os.getpid()} on "), message
            assert steps_then == 0 and agreed
    assert (run / "lock").read_text() == ""  # the job has ended
