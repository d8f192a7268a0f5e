"""The table of placements: what it says of memory and bytes, against formulas; and the spy that counts them."""

import json

import numpy as np
import pytest
from thread_ranks import run

import mpdp
from mpdp import bench, threads
from mpdp.bench import placements
from mpdp.bench.sides import setting
from mpdp.bench.traffic import Traffic
from mpdp.comm.base import host_memory


@pytest.mark.parametrize("n", [1, 3])
def test_the_table_has_what_the_formulas_say(n):
    def body():
        world = mpdp.init()
        return placements.measure(world, setting("mlp", "cpu", precision="float32", batch=2), 2, 0.01)

    found = threads.run(body, n, devices=["cpu"] * n)
    assert [row["placement"] for row in found[0]["rows"]] == ["replicated", "root", "sharded"]
    replicated, root, sharded = found[0]["rows"]
    nbytes = 4 * found[0]["elements"]
    assert replicated["optimizer_bytes"] == {"largest": nbytes, "sum": n * nbytes}
    assert root["optimizer_bytes"] == sharded["optimizer_bytes"] | {"largest": nbytes}
    assert sharded["optimizer_bytes"]["sum"] == nbytes
    assert sharded["optimizer_bytes"]["largest"] < nbytes / n + 10 * 4096 * 4
    for row in found[0]["rows"]:
        assert row["sent_bytes"]["mean"] == pytest.approx(2 * nbytes * (n - 1) / n, rel=1e-3)
        assert row["parameter_bytes"] == row["gradient_bytes"] == nbytes
        assert row["step_us"] > 0 and len(row["block_step_us"]) == 2
    lines = placements.table(found[0])
    assert len(lines) == 5 and lines[-1].split()[0] == "sharded"


def test_the_command_prints_the_table(capfd, tmp_path):
    path = tmp_path / "result.json"
    assert bench.main(["placements", "mlp", "--batch", "2", "--quick", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["ranks"] == 1
    assert "placement " in capfd.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["placements", "--batch", "0"])
    assert "--batch: expected 1 or more, got 0" in capfd.readouterr().err


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_spy_counts_what_each_call_sends(size):
    def body(comm):
        array = host_memory(4 * 1200).view(np.float32)
        bounds = [0, *[1200] * size]  # all of rank 0
        with Traffic(comm) as traffic:
            counts = []
            for call in (
                lambda: comm.all_reduce(array),
                lambda: comm.start_all_reduce(array).wait(),
                lambda: comm.reduce(array),
                lambda: comm.broadcast(array, root=size - 1),
                lambda: comm.reduce_scatter(array, bounds),
                lambda: comm.start_reduce_scatter(array, bounds).wait(),
                lambda: comm.start_all_gather(array, bounds).wait(),
                lambda: comm.all_reduce(array, lane="urgent"),
            ):
                before = traffic.sent["bulk"]
                call()
                counts.append(traffic.sent["bulk"] - before)
            assert traffic.calls == {"bulk": 7, "urgent": 1} and traffic.sent["urgent"] == counts[0]
        assert "all_reduce" not in vars(comm)
        return counts

    found = run(size, body)
    for rank, counts in enumerate(found):
        first, last = rank == 0, rank == size - 1
        all_reduced, others = 2 * 4800 * (size - 1) // size, 4800 * (size - 1)
        assert counts[:2] == [all_reduced] * 2
        assert counts[2] == (0 if first else 4800) and counts[3] == (others if last else 0)
        assert counts[4:6] == [0 if first else 4800] * 2
        assert counts[6] == (others if first else 0)
