"""The parent of a job: exit status, marks, signals, ranks that outlive the launcher; the job is a shell."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpdp import processes
from mpdp.cli import supervise as module
from mpdp.cli.command import Command
from mpdp.cli.supervise import Marks, supervise, verdict
from mpdp.processes import Process

# A rank's part in shell: `start R` with this shell as its process, `finish R`.
PRELUDE = f"""
mark() {{ echo -n "$2" > $MPDP_MARKS/$1.part; mv $MPDP_MARKS/$1.part $MPDP_MARKS/$1; }}
start() {{ mark started.$1 "{processes.node_name()} $2 $(cut -d' ' -f22 /proc/$2/stat)"; }}
finish() {{ : > $MPDP_MARKS/finished.$1; }}
failed() {{ mark failed.$1 "$2"; }}
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def shell(text):
    return Command(("bash", "-c", PRELUDE + text), {"SETTING": "7"})


@pytest.mark.parametrize(
    "status, started, finished, all_finished, expected",
    [
        (0, 0, 0, False, 0),  # a script without mpdp
        (0, 2, 2, False, 0),
        (0, 2, 0, True, 0),  # hosts that do not share the folder
        (0, 1, 1, True, 0),
        (0, 2, 1, False, 1),  # MPICH after os._exit(0)
        (0, 2, 0, False, 1),
        (3, 2, 2, False, 3),
        (9, 2, 1, False, 9),
        (-15, 2, 0, False, 143),
        (-9, 0, 0, False, 137),
    ],
)
def test_verdict(status, started, finished, all_finished, expected):
    marks = Marks(dict.fromkeys(range(started)), {}, set(range(finished)), all_finished)
    assert verdict(status, marks, 2) == expected


def test_settings_reach_the_job():
    assert supervise(shell('test "$SETTING" = 7'), 2) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_without_mpdp_keeps_its_status(code):
    assert supervise(shell(f"exit {code}"), 2) == code


@linux
def test_a_rank_that_did_not_finish_is_a_failure(capfd):
    assert supervise(shell("start 0 $$; start 1 $$; finish 0; exit 0"), 2) == 1
    assert "mpdp run: rank 1 of 2 did not finish" in capfd.readouterr().err


@linux
def test_all_ranks_finished():
    assert supervise(shell("start 0 $$; start 1 $$; finish 0; finish 1"), 2) == 0


@linux
def test_the_first_to_end_is_named(capfd):
    text = """
    sleep 30 & a=$!
    sleep 30 & b=$!
    start 0 $a; start 1 $b
    sleep 0.3; kill $b; wait $b; kill $a; wait; exit 9
    """
    assert supervise(shell(text), 2) == 9
    assert "mpdp run: rank 1 was the first to end, without a word" in capfd.readouterr().err


@linux
def test_a_job_that_goes_on_without_a_rank_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(module, "LOST", 0.3)
    begin = time.monotonic()
    assert supervise(shell("sleep 0.1 & start 1 $!; start 0 $$; wait; exec sleep 30"), 2) == 143
    assert time.monotonic() - begin < 25
    assert (
        "mpdp run: rank 1 ended without a word (killed, crashed or os._exit); ending the job"
        in capfd.readouterr().err
    )


@linux
def test_a_job_that_goes_on_after_a_failure_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(module, "FAILED", 0.3)
    assert supervise(shell("start 0 $$; failed 1; exec sleep 30"), 2) == 143
    assert "mpdp run: rank 1 failed and the job goes on; ending it" in capfd.readouterr().err


@linux
def test_the_first_failure_is_repeated_at_the_end(capfd):
    text = "start 0 $$; failed 1 'in step 3: ValueError: x'; sleep 0.1; failed 0 'in step 3: OSError'; exit 1"
    assert supervise(shell(text), 2) == 1
    assert capfd.readouterr().err == "mpdp run: rank 1 failed in step 3: ValueError: x\n"


@linux
def test_a_launcher_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr(module, "FAILED", 0.1)
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    assert supervise(shell("trap '' TERM; failed 1; while :; do sleep 0.1; done"), 2) == 137


@linux
def test_a_rank_that_outlives_the_launcher_is_killed():
    rank = subprocess.Popen(["sleep", "30"])
    try:
        assert supervise(shell(f"start 0 {rank.pid}; exit 7"), 1) == 7
        assert rank.wait(20) == -signal.SIGKILL
    finally:
        rank.kill()


@linux
def test_a_process_that_has_the_id_of_a_rank_by_chance_is_spared():
    other = subprocess.Popen(["sleep", "30"])
    try:
        supervise(
            shell(f'echo -n "{processes.node_name()} {other.pid} 1" > $MPDP_MARKS/started.0; exit 7'), 1
        )
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_forwarded(number, tmp_path):
    name = number.name.removeprefix("SIG")
    seen, ready = tmp_path / "seen", tmp_path / "ready"

    def send():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    trap = f"trap 'echo {name} >> {seen}; exit 5' {name}; : > {ready}"
    code = supervise(shell(f"{trap}; while :; do sleep 0.05; done"), 2)
    assert seen.read_text() == f"{name}\n"
    assert code == (130 if number == signal.SIGINT else 5)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    supervise(shell("exit 0"), 2)
    assert signal.getsignal(signal.SIGTERM) is before


@linux
def test_marks_of_another_host_have_no_process(tmp_path):
    (tmp_path / "started.0").write_text(f"{processes.node_name()} 17 42")
    (tmp_path / "started.1").write_text("another host 17 42")
    (tmp_path / "failed.1.part").write_text("")
    assert Marks.read(tmp_path) == Marks({0: Process(17, 42, "", 0, ""), 1: None}, {}, set(), False)


def test_sigterm_goes_to_ranks_that_listen_as_sigusr1(tmp_path):
    """Open MPI's mpirun would kill them half a second after SIGTERM."""
    seen, ready = tmp_path / "seen", tmp_path / "ready"
    text = f"""
    trap 'echo USR1 >> {seen}' USR1
    trap 'echo TERM >> {seen}' TERM
    : > $MPDP_MARKS/listening.0; : > {ready}
    for i in $(seq 200); do sleep 0.05; [ "$(cat {seen} 2>/dev/null | wc -l)" = 2 ] && break; done
    exit 75
    """

    def send():
        for lines in (0, 1):  # two signals that come at once are one
            while not ready.exists() or (lines and not seen.exists()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    ended = module.watch(shell(text), 2)
    assert seen.read_text() == "USR1\nUSR1\n"
    assert (ended.status, ended.ordered) == (75, True)


def test_what_the_ranks_say_of_their_progress(tmp_path):
    ended = module.watch(shell(": > $MPDP_MARKS/updated.1; echo -n 40 > $MPDP_MARKS/saved.0; exit 3"), 2)
    assert (ended.status, ended.ordered) == (3, False)
    assert ended.marks.updated and ended.marks.saved == 40
    assert Marks.read(tmp_path) == Marks({}, {}, set(), False, False, None)


def test_a_job_is_told_how_often_it_was_started_again(monkeypatch):
    monkeypatch.setenv("MPDP_RESTART", "4")
    assert supervise(shell('test "$MPDP_RESTART" = 0'), 2) == 0
    again = Command(shell('test "$MPDP_RESTART" = 2').words, {"MPDP_RESTART": "2"})
    assert supervise(again, 2) == 0
