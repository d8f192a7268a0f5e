"""The report of several GPUs: its limits, its notes, and that the commands it would run there exist."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from mpdp import bench

PATH = Path(__file__).parents[2] / "scripts" / "multi_gpu_report.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("multi_gpu_report", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def command(script, code, seconds=30.0, name="one"):
    return script.Command(name, f"Title of {name}", [sys.executable, "-c", code], seconds, {"GIVEN": "1"})


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(script):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    status, output = script.run_limited(command(script, code), 3.0)
    assert status is None
    child = int(output.split()[0])
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


def test_the_report_goes_on_behind_a_failure_and_says_what_did_not_run(script, tmp_path):
    path = tmp_path / "report.md"
    report = script.Report(path, 100.0, "# Heading")
    report.run(command(script, "print('reason'); raise SystemExit(3)", name="bad"))
    report.run(command(script, "import os; print('x'); print('given', os.environ['GIVEN'])", name="good"))
    report._ends = time.monotonic() + 5
    report.run(command(script, "print('never')", name="late"))
    text = path.read_text()
    assert report.failed == 2
    assert text.startswith("# Heading\n") and "## Title of bad" in text
    assert "FAILED with status 3" in text and "see bad.log" in text
    assert (tmp_path / "bad.log").read_text() == "reason\n" and not (tmp_path / "good.log").exists()
    assert "    given 1\n" in text and "    x\n" not in text
    assert "NOT RUN" in text and "never\n" not in text.splitlines()
    assert str(Path(sys.executable).parent) + os.sep not in text.replace(sys.executable, "")


@pytest.mark.parametrize(
    ("device", "sizes", "shared"), [("cuda", [2, 4, 8], False), ("cuda", [2], True), ("cpu", [2], False)]
)
def test_every_command_of_a_plan_exists(script, monkeypatch, tmp_path, device, sizes, shared):
    plan = script.Plan(tmp_path, device, sizes, shared=shared, quick=shared, peers=not shared)
    parsed = []
    for name in ("_train", "_all_reduce", "_contention", "_placements"):
        monkeypatch.setattr(bench, name, lambda arguments: parsed.append(arguments) or 0)
    commands = [*plan.first(), *plan.second()]
    assert len({each.name for each in commands}) == len(commands)
    for each in commands:
        words = each.words
        if "bench" in words:
            assert bench.main(words[words.index("bench") + 1 :]) == 0, words
        elif "pytest" in words:
            assert all((PATH.parents[1] / word).exists() for word in words if word.startswith("tests/"))
        else:
            assert Path(next(word for word in words if word.endswith(".py"))).exists()
    assert len(parsed) == sum("bench" in each.words for each in commands) > 5
    transports = {each.environ.get("MPDP_TRANSPORT") for each in commands}
    assert ("nccl" in transports) == (device == "cuda" and not shared)
