"""The all-reduce benchmark: its arguments, its figures, the object it writes and the plot."""

import json
import sys

import pytest

from mpdp import bench
from mpdp.bench import _sizes, all_reduce, reductions
from mpdp.bench.plot import plot_all_reduce
from mpdp.errors import MissingDependencyError


def test_a_world_of_one_measures_its_own_transport(tmp_path, capsys):
    path = tmp_path / "result.json"
    words = ["all-reduce", "--quick", "--sizes", "8,64K", "--dtypes", "float32,bfloat16", "--json", str(path)]
    assert bench.main(words) == 0
    result = json.loads(path.read_text())
    assert (result["benchmark"], result["device"], result["ranks"]) == ("all-reduce", "cpu", 1)
    assert [(row["bytes"], row["dtype"], row["case"], row["right"]) for row in result["rows"]] == [
        (nbytes, dtype, "solo", True) for dtype in ("float32", "bfloat16") for nbytes in (8, 65536)
    ]
    for row in result["rows"]:
        low, high = row["quartiles_us"]
        assert low <= row["us"] <= high
        assert row["algbw"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["busbw"] == 0  # nothing travels
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5
    assert all(line.endswith("right") for line in table[1:])
    assert bench.main(["all-reduce", "--quick", "--sizes", "8", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]


def test_a_wrong_sum_is_shown_and_makes_the_status_1(monkeypatch, capsys):
    class Wrong(reductions.Here):
        def is_right(self):
            return False

    monkeypatch.setattr(reductions, "Here", Wrong)
    assert bench.main(["all-reduce", "--quick", "--sizes", "8"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("WRONG")


def test_sizes_are_bytes_with_units():
    assert _sizes("8,64K,1m,2MiB,1GB") == (8, 65536, 1 << 20, 2 << 20, 1 << 30)
    assert max(all_reduce.SIZES) == 256 << 20
    assert min(all_reduce.SIZES) == 8


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes", "0"],
        ["--sizes", "8,"],
        ["--sizes", "x"],
        ["--dtypes", "int3"],
        ["--transports", "pigeon"],
        ["--transports", "nccl"],
        ["--transports", "mpi,shared_memory", "--device", "cuda"],
        ["--device", "tpu"],
    ],
)
def test_usage_errors_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["all-reduce", *words])
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_time_is_spent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r'install it with: pip install "mpdp\[plot\]"'):
        bench.main(["all-reduce", "--plot", str(tmp_path / "plot.png")])


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"case": "mpi", "dtype": "float32", "quartiles_us": [1.0, 3.0], "us": 2.0, "busbw": 1.0}
    result = {"ranks": 2, "device": "cpu", "processor": "a processor"}
    result["rows"] = [row | {"bytes": 8}, row | {"bytes": 4096}]
    plot_all_reduce(result, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_error_that_comes_only_after_minutes_comes_at_once(tmp_path):
    with pytest.raises(SystemExit) as caught:
        bench.main(["all-reduce", "--json", str(tmp_path / "missing" / "result.json")])
    assert caught.value.code == 2
