"""The plot of a comparison of training steps."""

import pytest

from mpdp.bench.plot import plot_train


def test_a_bar_for_each_kind_of_work_and_a_legend_of_all(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra plot is not installed")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)  # to look at the figure
    rows = [
        {"name": "mpdp", "step_us": 10.0, "breakdown_us": {"products": 6.0, "gaps": 4.0}},
        {"name": "torch", "step_us": 15.0, "breakdown_us": None},
    ]
    for row in rows:
        row["quartiles_us"] = [row["step_us"] - 1, row["step_us"] + 2]
    result = {"workload": "mlp", "precision": "float32", "ranks": 1, "processor": "a CPU", "sides": rows}
    plot_train(result, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000
    (axes,) = drawn[0].axes
    assert [bar.get_width() for bar in axes.patches] == [6.0, 4.0, 15.0]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["products", "gaps", "step"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mpdp", "torch"]
