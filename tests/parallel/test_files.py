"""Run folders with odd names work; one that cannot be written is one error on all ranks, at the start if possible."""

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
