"""The restart drill with a few kills; `python scripts/restart_drill.py` does ten, at other moments each time."""

import json
import sys

import launching

DRILL = launching.ROOT / "scripts" / "restart_drill.py"


def test_killed_at_random_and_restarted(job, tmp_path):
    """Every kind of kill but by chance; weights and moments have the bits of the run that nobody disturbed."""
    report = tmp_path / "report.json"
    words = [sys.executable, str(DRILL), "--kills", "3", "--seed", "17", "--json", str(report)]
    result = launching.run(words, timeout=120).check()
    found = json.loads(report.read_text())
    assert found["same_bits"] and found["status"] == 0 and len(found["kills"]) == 3, result
    assert result.output.count("mpdp run: restart ") == 3, result
