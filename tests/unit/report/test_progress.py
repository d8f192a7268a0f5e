"""What is shown where stderr is no terminal, narrow, closed or full."""

import io
import sys

import pytest

from mpdp.report.progress import Progress


class Stream(io.StringIO):
    def __init__(self, encoding="utf-8", terminal=False, broken=False):
        super().__init__()
        self._encoding, self.terminal, self.broken = encoding, terminal, broken

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self.terminal

    def write(self, text):
        if self.broken:
            raise OSError(28, "No space left on device")
        text.encode(self._encoding)
        return super().write(text)


def run(shown=True):
    progress = Progress(shown, 10, 4, 2)
    for _ in range(3):
        progress.step(0.5, 32)
    progress.epoch({"epoch": 1, "step": 7, "loss": 0.5, "accuracy": 0.75})
    progress.say("a line")
    progress.close()


def test_one_line_an_epoch_where_there_is_no_terminal(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    run()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[0/2] epoch 1 loss 0.5000 accuracy 0.7500 ")
    assert "samples/s" in lines[0] and lines[0].endswith("s left")
    assert lines[1] == "[0/2] a line"


def test_time_left_counts_the_updates_of_this_call(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    now = iter([0.0, 10.0])
    monkeypatch.setattr("mpdp.report.progress.time.monotonic", lambda: next(now))
    progress = Progress(True, 1000, 900, 1)
    for _ in range(10):
        progress.step(1.0, 8)
    progress.epoch({"epoch": 1, "loss": 1.0})
    assert stream.getvalue().strip().endswith("90 s left")


def test_a_bar_on_a_terminal(monkeypatch):
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    run()
    assert "7/10" in stream.getvalue() or "4/10" in stream.getvalue()
    assert "[0/2] epoch 1" in stream.getvalue()


def test_other_ranks_show_nothing(monkeypatch):
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    run(shown=False)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_ascii_bar_for_narrow_streams(monkeypatch, encoding):
    """K5: no UnicodeEncodeError."""
    stream = Stream(encoding=encoding, terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    run()
    assert stream.getvalue().isascii()


def test_a_stream_that_cannot_be_written_stops_nothing(monkeypatch):
    for stream in (Stream(broken=True), None):
        monkeypatch.setattr(sys, "stderr", stream)
        run()
    closed = Stream()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    run()


def test_a_bar_in_a_notebook(monkeypatch):
    """It is no terminal; without widgets the bar is made of characters."""
    kernel = type("ZMQInteractiveShell", (), {})()
    module = type(sys)("IPython")
    module.get_ipython = lambda: kernel
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    run()
    assert "/10" in stream.getvalue() and "[0/2] epoch 1" in stream.getvalue()
    module.get_ipython = lambda: None  # IPython on a terminal that is none
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    run()
    assert "/10" not in stream.getvalue()
