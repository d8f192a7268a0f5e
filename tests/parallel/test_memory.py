"""H2: ranks that read one mapped array share its pages; and steps leave nothing behind."""

import json
import sys

import pytest
from launching import mpirun, run


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is Linux's")
@pytest.mark.parametrize("size", [1, 4])
def test_one_copy_of_a_mapped_array_and_flat_memory(job, tmp_path, size):
    line, settings = mpirun(size)
    path = tmp_path / "memory.json"
    words = ["-m", "mpdp", "bench", "memory", "--bytes", "800M", "--json", str(path)]
    run([*line, sys.executable, *words], environ=settings, timeout=90).check()
    result = json.loads(path.read_text())
    assert result["ranks"] == size and result["array_bytes"] == 800 << 20
    assert 0.9 < result["mapped_ratio"] < 1.25, "about one copy, not one a rank"
    assert result["live_tapes"] <= 1 and result["steps_growth_bytes"] < 2 << 20, result
