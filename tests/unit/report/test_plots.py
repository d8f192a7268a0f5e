"""What is read from logs, and that it becomes a picture."""

import json
import sys

import pytest

from mpdp.cli.plot import _names
from mpdp.cli.plot import main as plot
from mpdp.report import plots


def write(folder, updates=1000, metric="accuracy", ranks=True):
    folder.mkdir(parents=True)
    rows = [
        {"kind": "step", "step": k, "epoch": 1, "loss": 1.0 / k, "lr": 0.1, "seconds": 0.01, "samples": 32,
         "data_seconds": 0.002, "message_seconds": 0.003}
        for k in range(1, updates + 1)
    ]  # fmt: skip
    rows[0]["seconds"] = 5.0
    rows[2]["loss"] = None  # it was not finite
    rows.append(
        {"kind": "epoch", "epoch": 1, "step": updates, "loss": 0.1, "validation_loss": 0.2, metric: 0.9}
    )
    if ranks:
        one = {"host": "here", "step": 0.01, "data": 0.001, "compute": 0.004, "messages": 0.005}
        slow = {"host": "here", "step": 0.01, "data": 0.001, "compute": 0.009, "messages": 0.0}
        rows.append({"kind": "ranks", "step": updates, "ranks": [{"rank": 0, **one}, {"rank": 1, **slow}]})
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"kind": "ste')
    return folder


def test_what_is_read(tmp_path):
    log = plots.read_log(write(tmp_path / "run"))
    steps = plots.rows_of(log, "step")
    assert len(steps) == 1000 and plots.metric_names([log]) == ["accuracy"]
    x, mean, low, high = plots.curve(steps, "loss")
    assert len(x) == 333 and x[-1] == 1000, "groups of three of 999 finite values"
    assert mean[0] == pytest.approx((1 + 1 / 2 + 1 / 4) / 3) and (low[0], high[0]) == (1 / 4, 1.0)
    rates = plots.throughput(steps)
    assert len(rates) == 999 and {row["rate"] for row in rates} == {3200.0}, "the first includes start-up"
    assert plots.breakdown(log) == pytest.approx({"data": 1.0, "messages": 2.5, "compute": 6.5})
    without = [row for row in log if row["kind"] != "ranks"]
    assert plots.breakdown(without) == pytest.approx({"data": 2.0, "messages": 3.0, "compute": 5.0})
    assert plots.breakdown(plots.rows_of(log, "epoch")) == {}


def test_runs_over_one_another(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    a, b = write(tmp_path / "a" / "run"), write(tmp_path / "b" / "run", 50, "top_5", ranks=False)
    assert plot([str(a)]) == 0
    out = capsys.readouterr().out
    assert "rank 1 (here) is slow" in out and "plots/run.png" in out
    assert plot([str(a), str(b), "-o", str(tmp_path / "both.png")]) == 0
    with image.open(a / "plots" / "run.png") as one, image.open(tmp_path / "both.png") as two:
        assert one.size[0] > 1000 and two.size[1] >= one.size[1]
        colours = {colour for _, colour in two.convert("RGB").getcolors(1 << 24)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours, "a colour for each run"
    logs = {str(folder): plots.read_log(folder) for folder in (a, b)}
    titles = plots.plot_runs(logs, tmp_path / "new" / "both.png")
    assert titles == [
        "loss",
        "accuracy",
        "top_5",
        "learning rate",
        "samples a second",
        "ms a step (mean over ranks)",
    ]


def test_names_tell_runs_apart(tmp_path):
    assert _names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert _names([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]
    assert _names([tmp_path / "x", tmp_path / "x"]) == ["x", "x (2)"]


def test_what_is_no_run(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        plot([str(tmp_path)])
    assert ended.value.code == 2
    assert "RUN_DIR: expected the folder of a run with log.jsonl, got" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"kind": "step"}\n')
    with pytest.raises(ValueError, match=r"RUN_DIR: expected a row of a log, got line 1 of .*log.jsonl"):
        plots.read_log(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot([str(write(tmp_path / "run"))]) == 1
    assert 'pip install "mpdp[plot]"' in capsys.readouterr().err
