"""What /proc says, with real processes."""

import os
import signal
import subprocess
import sys
import time

import launching
import pytest

from mpdp import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_is_seen_and_ends():
    child = subprocess.Popen(["sleep", "30"])
    process = processes.look(child.pid)
    assert process is not None and process.parent == os.getpid() and not process.ended
    assert process.pid in [found.pid for found in processes.children(os.getpid())]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.ended  # a zombie has ended
    assert process.pid not in [found.pid for found in processes.children(os.getpid())]
    child.wait()
    assert process.ended and processes.look(child.pid) is None


def test_a_name_with_spaces_and_brackets(tmp_path):
    program = tmp_path / "a) b (c"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "30"])
    try:
        for _ in range(100):  # until it has replaced the copy of this process
            process = processes.look(child.pid)
            if process.name == "a) b (c":
                break
        assert process.parent == os.getpid()
    finally:
        child.kill()
        child.wait()


def test_ancestors_lead_from_here_to_the_first_process():
    pids = [process.pid for process in processes.ancestors(os.getpid())]
    assert pids[:2] == [os.getpid(), os.getppid()]


@pytest.mark.parametrize("name", ["mpirun", "hydra_pmi_proxy", "prterun"])
@pytest.mark.parametrize("wrapper", ["", "timeout 20 ", 'bash -c \'exec "$0" "$@"; true\' '])
def test_the_launcher_is_found_behind_wrappers(tmp_path, name, wrapper):
    """A copy of Python under a launcher's name starts the rank as a launcher does."""
    (tmp_path / name).symlink_to("/bin/bash")
    code = "from mpdp import processes; p = processes.launcher(); print(p.name, p.pid)"
    script = tmp_path / "rank.py"
    script.write_text(code)
    environ = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2", "PYTHONPATH": str(launching.ROOT)}
    child = subprocess.Popen(
        [str(tmp_path / name), "-c", f"{wrapper}{sys.executable} {script}; true"],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert child.communicate(timeout=20)[0].split() == [name, str(child.pid)]


def test_ranks_among_the_children():
    environ = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2"}
    rank = subprocess.Popen(["sleep", "30"], env=environ)
    other = subprocess.Popen(["sleep", "30"])
    try:
        me = processes.look(os.getpid())
        for _ in range(1000):  # until both have replaced the copies of this process
            if processes.environment(rank.pid).get("PMI_RANK"):
                break
        assert processes.ranks_of(me) == {1}
    finally:
        for child in (rank, other):
            child.kill()
            child.wait()


def test_where_nothing_is_known(monkeypatch):
    monkeypatch.setattr("builtins.open", _refuse)
    monkeypatch.setattr(os, "listdir", _refuse)
    assert processes.look(os.getpid()) is None
    assert processes.launcher() is None
    assert processes.children(os.getpid()) is None
    assert processes.environment(os.getpid()) is None
    assert processes.node_name()


def _refuse(*arguments, **options):
    raise OSError("no /proc")


@pytest.mark.parametrize("released", [False, True])
def test_a_process_may_end_with_its_parent(tmp_path, released):
    """A middle process starts one that ends with it, unless it has changed its mind, and is gone."""
    child = (
        "import os, time; from mpdp import processes; "
        "processes.end_with(processes.look(os.getppid())); "
        f"{'processes.end_with(None); ' if released else ''}"
        f"open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid())); "
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'ready')!r}); time.sleep(20)"
    )
    middle = (
        "import subprocess, sys, time, pathlib; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"[time.sleep(0.02) for _ in range(500) if not pathlib.Path({str(tmp_path / 'ready')!r}).exists()]"
    )
    environ = {**os.environ, "PYTHONPATH": str(launching.ROOT)}
    subprocess.run([sys.executable, "-c", middle], env=environ, check=True)
    pid = int((tmp_path / "ready").read_text())
    deadline = time.monotonic() + (0.2 if released else 10)
    alive = True
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        process = processes.look(pid)
        alive = process is not None and process.state not in "ZX"
    if alive:
        os.kill(pid, signal.SIGKILL)
    assert alive == released


def test_a_process_whose_parent_is_gone_already_ends():
    gone = processes.Process(2**22 - 1, 1, "mpirun", 1, "S")
    child = os.fork()
    if child == 0:
        processes.end_with(gone)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
