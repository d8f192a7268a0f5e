"""``mpdp bench contention`` as a whole, on CPUs."""

import json
import sys

from launching import run


def test_a_quick_run_always_ends_with_a_verdict(job, tmp_path):
    path = tmp_path / "c.json"
    line = [
        sys.executable,
        "-m",
        "mpdp",
        "bench",
        "contention",
        "--device",
        "cpu",
        "--quick",
        "--json",
        str(path),
    ]
    result = run(line, timeout=90).check()
    assert result.output.strip().splitlines()[-1].startswith("verdict: ")
    found = json.loads(path.read_text())
    assert found["gpus"] == 0 and found["word"] in ("no contention", "lock", "undecided")
    assert f"verdict: {found['verdict']}" in result.output
    samples = [json.loads(text) for text in (tmp_path / "c.json.samples.jsonl").read_text().splitlines()]
    launches = [sample for sample in samples if "row" in sample]
    assert len(launches) == sum(row["accepted"] + row["refused"] for row in found["rows"]) > 0
    assert all(sum(sample["histogram"]) == sample["n"] * sample["k"] for sample in launches)
    (steps,) = found["steps"]
    assert set(steps["refused"]) == {"threads", "processes", "one process"}
    assert steps["about"]["threads"]["transport"] == "threads"
    assert steps["about"]["processes"]["transport"] == "shared_memory"
    assert all(seconds > 0 for blocks in steps["blocks"].values() for seconds in blocks)
    blocks = [sample for sample in samples if "step" in sample]
    for name, refused in steps["refused"].items():
        assert sum(sample["job"] == name for sample in blocks) == len(steps["blocks"][name]) + refused
    kept = run([sys.executable, "-m", "mpdp", "doctor"])
    assert "threads or processes: " in kept.output
