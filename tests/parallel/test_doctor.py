"""``mpdp doctor`` under a launcher: one report about all ranks."""

import json

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("size", "nodes", "why"),
    [(1, 1, "a world of one"), (3, 1, "all ranks are on one node"), (3, 2, ""), (2, 2, "")],
)
def test_the_job_is_described_once(job, tmp_path, size, nodes, why):
    path = tmp_path / "doctor.json"
    environ = {"MPDP_NODES": str(nodes)} if nodes > 1 else {}
    result = job(PROGRAMS / "command.py", "doctor", "--json", path, n=size, environ=environ)
    report = json.loads(path.read_text())
    assert result.rc == (1 if report["problems"] else 0), f"{result}"
    assert report["job"]["ranks"] == size
    assert report["job"]["nodes"] == nodes
    assert (why or f"the ranks are on {nodes} nodes") in report["job"]["transport_reason"]
    if size > 1:  # what was foreseen is what was taken
        kind = "gpu" if report["job"]["by_rank"][0]["device"].startswith("cuda") else "cpu"
        assert report["auto"][kind]["transport"] == report["job"]["transport"]
    assert report["job"]["thread_level"] == "multiple"
    assert [r["rank"] for r in report["job"]["by_rank"]] == list(range(size))
    assert result.output.count("packages:") == 1
    crowded = [p for p in report["problems"] if "ranks on a node of" in p["what"]]
    assert bool(crowded) == (-(-size // nodes) > report["cores"]["machine"])
