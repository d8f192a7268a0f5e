"""The guard's hooks and reports, in a process that believes a launcher; tests/parallel has real jobs."""

import atexit
import os
import subprocess
import sys
import threading

import launching
import pytest

from mpdp import guard as module
from mpdp.comm.activity import secondary
from mpdp.errors import on_all_ranks
from mpdp.guard import Guard
from mpdp.processes import Process

RANK_1_OF_4 = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


class Ended(BaseException):
    """What a call that would end the process raises here."""


class Ring:
    def __init__(self):
        self.failure, self.told, self.closed = None, [], False

    def fail(self, summary, **options):
        self.told.append((summary, options))

    def leave(self):
        pass

    def close(self):
        self.closed = True

    def forget(self):
        self.closed = True

    def others(self):
        return "rank 0 in step 3 (all_reduce)"


class Guarded(Guard):
    def end(self, code=1):
        raise Ended(code)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a guard installed for rank r of n; hooks and handlers are put back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    monkeypatch.setattr(module, "SPREAD", 0.0)
    monkeypatch.setattr(module, "DEADLINE", 0.05)
    monkeypatch.setenv(module.MARKS, str(tmp_path))
    monkeypatch.delenv(module.RANK_PROCESS, raising=False)
    made = []

    def make(rank=1, size=4, ring=True):
        guard = Guarded()
        made.append(guard)
        guard.install(
            {
                **RANK_1_OF_4,
                "PMI_RANK": str(rank),
                "PMI_SIZE": str(size),
                "MPI_LOCALNRANKS": str(size),
                "MPI_LOCALRANKID": str(rank),
            }
        )
        if ring:
            guard.attach(Ring())
            guard.activity.step = 12
        return guard

    yield make
    for guard in made:
        atexit.unregister(guard._on_exit)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_without_a_launcher_nothing_is_installed():
    hooks = sys.excepthook, threading.excepthook
    guard = Guard()
    assert guard.install({}) is False
    assert (sys.excepthook, threading.excepthook) == hooks
    guard.fail(ValueError("x"))  # a world of one: the error goes its way


def test_under_a_launcher_the_hooks_are_installed_once(make, tmp_path):
    guard = make()
    assert sys.excepthook == guard._on_error and threading.excepthook == guard._on_thread_error
    assert guard.announcement.size == 4
    assert guard.install({}) is True
    assert [path.name for path in tmp_path.iterdir()] == ["started.1"]
    assert os.environ[module.RANK_PROCESS] == str(os.getpid())


def test_a_job_of_one_only_leaves_marks(make, tmp_path):
    hook = sys.excepthook
    guard = make(rank=0, size=1, ring=False)
    assert sys.excepthook == hook
    guard._on_exit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finished.0", "started.0"]


def test_variables_that_make_no_sense_are_left_to_init():
    assert Guard().install({"PMI_RANK": "x", "PMI_SIZE": "2"}) is False


def test_a_process_that_a_rank_has_started_is_no_rank(make):
    environ = {**RANK_1_OF_4, module.RANK_PROCESS: str(os.getppid())}
    assert Guard().install(environ) is False
    code = f"from mpdp.guard import Guard; print(Guard().install({environ!r}))"
    environ[module.RANK_PROCESS] = str(os.getpid())
    child = [sys.executable, "-c", f"from mpdp.guard import Guard; print(Guard().install({environ!r}))"]
    result = subprocess.run(child, capture_output=True, text=True, env={"PYTHONPATH": str(launching.ROOT)})
    assert result.stdout == "False\n", (result.stderr, code)


def test_a_job_that_a_rank_has_started_has_ranks_of_its_own(make, monkeypatch):
    between = Process(os.getppid(), 1, "mpirun", 1, "S")
    monkeypatch.setattr(module.processes, "launcher", lambda: between)
    environ = {**RANK_1_OF_4, module.RANK_PROCESS: "1"}
    assert module._belongs_to_a_rank(environ) is False


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_worker_of_a_pool_is_no_rank(tmp_path, method):
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from mpdp import guard\n"
        "guard.install()\n"
        "def look(_): return guard.current.announcement is None\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool: print(pool.map(look, [0]))\n"
        "    sys.stdout.flush(); import os; os._exit(0)\n"
    )
    environ = {**os.environ, **RANK_1_OF_4, "PYTHONPATH": str(launching.ROOT)}
    environ.pop(module.RANK_PROCESS, None)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ, timeout=30)
    assert result.stdout == "[True]\n", result.stderr


def test_importing_it_loads_neither_mpi_nor_cupy():
    code = "import sys; from mpdp import guard; print({'mpi4py', 'cupy'} & set(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": str(launching.ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert result.stdout == "set()\n", result.stderr


def test_an_uncaught_error_is_reported_with_rank_and_step(make, capfd, tmp_path):
    guard = make()
    error = raised(ValueError("a bad sample\nof two lines"))
    with pytest.raises(Ended, match="1"):
        sys.excepthook(type(error), error, error.__traceback__)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "[1/4] error in step 12: ValueError: a bad sample"
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "of two lines"
    assert guard.ring.told == [("ValueError: a bad sample", {"code": 1})]
    assert (tmp_path / "failed.1").read_text() == "in step 12: ValueError: a bad sample"


def test_before_init_there_is_no_step(make, capfd):
    make(ring=False)
    error = raised(KeyError())
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err.startswith("[1/4] error before init: KeyError\n")


def test_an_error_in_a_thread_is_reported_with_its_name(make, capfd):
    make()
    error = raised(OSError("gone"))
    with pytest.raises(Ended):
        threading.excepthook(
            threading.ExceptHookArgs((OSError, error, error.__traceback__, threading.Thread(name="loader")))
        )
    assert capfd.readouterr().err.startswith("[1/4] error in step 12: OSError: gone (in thread 'loader')\n")


def test_a_thread_that_exits_is_no_failure(make, capfd):
    make()
    threading.excepthook(threading.ExceptHookArgs((SystemExit, SystemExit(3), None, None)))
    assert capfd.readouterr().err == ""


def test_an_interrupt_is_short(make, capfd):
    make(rank=0)
    error = raised(KeyboardInterrupt())
    with pytest.raises(Ended, match="130"):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err == "[0/4] error in step 12: KeyboardInterrupt\n"


def test_what_fail_has_reported_is_not_printed_again(make, capfd):
    guard = make()
    error = raised(ValueError("a bad sample"))
    guard.fail(error)
    assert capfd.readouterr().err.count("ValueError: a bad sample") == 2  # the head and the traceback
    assert guard.ring.told == [("ValueError: a bad sample", {"after": module.DEADLINE})]
    guard.fail(error)
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err == "" and len(guard.ring.told) == 1


def test_an_error_that_only_repeats_a_failure_is_not_printed(make, capfd):
    guard = make()
    error = raised(secondary("all_reduce: expected all ranks alive"))
    guard.fail(error)
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err == "" and guard.ring.told == []


def test_after_another_ranks_report_this_one_is_quiet(make, capfd):
    guard = make()
    guard.ring.failure = "rank 0 failed in step 12: ValueError: a bad sample"
    error = raised(RuntimeError("the connection broke"))
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err == "" and guard.ring.told == []


def agreed():
    error = RuntimeError("layouts differ")
    error.agreed = True
    return raised(error)


def test_an_agreed_error_is_printed_by_rank_0(make, capfd):
    guard = make(rank=0)
    error = agreed()
    guard.fail(error)  # not here: a program may catch it on all ranks and go on
    assert guard.ring.told == []
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err.startswith(
        "[0/4] error in step 12: RuntimeError: layouts differ (on all ranks)\n"
    )


def test_an_agreed_error_says_once_on_which_ranks_it_was(make, capfd):
    make(rank=0)
    error = ValueError("lr: too large (on every rank)")
    error.agreed = True
    error = raised(error)
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err.startswith(
        "[0/4] error in step 12: ValueError: lr: too large (on every rank)\n"
    )


def test_the_other_ranks_wait_for_rank_0_to_print_an_agreed_error(make, capfd):
    guard = make(rank=1)
    threading.Timer(0.1, setattr, (guard.ring, "failure", "rank 0 failed")).start()
    error = agreed()
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)
    assert capfd.readouterr().err == ""


def test_one_process_prints_one_report(make, capfd):
    guard = make()
    assert guard.report("one", "body\n") is True
    assert guard.report("two") is False
    assert capfd.readouterr().err == "[1/4] error in step 12: one\nbody\n"


def test_an_orderly_end_leaves_its_mark(make, tmp_path):
    guard = make(rank=0)
    guard._on_exit()
    assert guard.ring.closed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finished.0", "finished.all", "started.0"]


def test_what_is_held_of_other_ranks_is_let_go_when_all_have_left(make):
    guard, order = make(), []
    guard.ring.leave = lambda: order.append("all left")
    guard.at_end(lambda: order.append("first"))
    guard.at_end(lambda: order.append("second") or 1 / 0)
    guard._on_exit()
    assert order == ["all left", "second", "first"] and guard.ring.closed


def test_the_end_of_a_rank_that_was_inside_init_is_a_failure(make, capfd, tmp_path):
    guard = make(ring=False)
    guard.met = True
    with pytest.raises(Ended):
        guard._on_exit()
    assert "[1/4] error before init: this rank left inside mpdp.init()" in capfd.readouterr().err
    assert not (tmp_path / "finished.1").exists()


def test_the_end_after_a_caught_failure_is_a_failure(make):
    guard = make()
    guard.fail(ValueError("a bad sample"))
    with pytest.raises(Ended):
        guard._on_exit()


def test_a_forked_child_is_no_rank(make):
    guard = make()
    ring = guard.ring
    guard._on_fork()
    assert ring.closed and guard.ring is None and guard.announcement is None
    guard._on_exit()


def test_the_marks_of_an_outer_job_are_not_written_by_an_inner_one(make, monkeypatch, tmp_path):
    monkeypatch.setenv(module.RANK_PROCESS, "1")
    monkeypatch.setattr(module, "_belongs_to_a_rank", lambda environ: False)
    guard = Guarded()
    guard.install(
        {
            **RANK_1_OF_4,
            "PMI_SIZE": "1",
            "PMI_RANK": "0",
            "MPI_LOCALNRANKS": "1",
            "MPI_LOCALRANKID": "0",
            module.RANK_PROCESS: "1",
        }
    )
    atexit.unregister(guard._on_exit)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_ends_the_job_all_the_same(make, monkeypatch):
    guard = make()
    monkeypatch.setattr(guard, "_report_error", lambda *arguments: (_ for _ in ()).throw(MemoryError()))
    error = raised(ValueError("a bad sample"))
    with pytest.raises(Ended):
        sys.excepthook(type(error), error, error.__traceback__)


def test_a_missing_folder_of_marks_is_no_error(make, monkeypatch):
    monkeypatch.setenv(module.MARKS, "/nonexistent")
    make()._on_exit()


def test_a_report_is_followed_by_where_the_others_were(make, capfd):
    guard = make()
    guard.say_others()
    assert capfd.readouterr().err == ""
    guard.report("ValueError: a bad sample")
    guard.say_others()
    assert capfd.readouterr().err.splitlines()[1:] == [
        "[1/4] info the other ranks were then: rank 0 in step 3 (all_reduce)"
    ]


def test_an_error_of_all_ranks_says_nothing_of_the_others(make, capfd):
    guard = make(rank=0)
    with pytest.raises(Ended):
        guard._on_error(RuntimeError, raised(on_all_ranks(RuntimeError("layouts differ"))), None)
    guard.say_others()
    assert "the other ranks" not in capfd.readouterr().err


def test_the_launcher_gets_time_to_read_the_last_line(make, monkeypatch, capfd):
    """MPICH's drops what it has not read when a rank aborts."""
    slept = []

    def ended(pid, number):
        raise Ended(pid)

    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda *arguments, **options: None)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(os, "kill", ended)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    guard = make()
    guard.report("ValueError: a bad sample")
    slept.clear()
    with pytest.raises(Ended):
        Guard.end(guard)
    assert len(slept) == 1 and 0.5 * module.READING < slept[0] <= module.READING, slept
    assert capfd.readouterr().err.endswith("info the other ranks were then: rank 0 in step 3 (all_reduce)\n")
