"""A slow rank is named, with what it spends its time on."""

import json

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("kind", "reason"), [("data", "it waits for its data for"), ("compute", "it computes for")]
)
def test_a_slow_rank_is_named(job, tmp_path, kind, reason):
    result = job(PROGRAMS / "stragglers.py", kind, tmp_path / "run", n=2).check()
    lines = [line for line in result.output.splitlines() if "is slow" in line]
    assert len(lines) == 1 and lines[0].startswith("[0/2] warning rank 1 (") and reason in lines[0], result
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (ranks,) = [row["ranks"] for row in rows if row["kind"] == "ranks"]
    assert ranks[0]["messages"] > 0.5 * ranks[1][kind], "the other one has waited in messages"
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["samples"] for row in steps] == [6] * 12
    assert all(row["data_seconds"] >= 0 and 0 <= row["message_seconds"] < row["seconds"] for row in steps)
