"""Run folders with odd names work; one that cannot be written is one error on all ranks, at the start if possible."""

import os

import pytest
from launching import PROGRAMS


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
