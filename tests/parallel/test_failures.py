"""Whatever one rank does, the job ends soon, says so once, and never ends with status 0.

The committed table holds pairs that cover every fault, moment, world size and launch form once or more.
`PYTHONPATH=.:tests python tests/parallel/test_failures.py` prints the whole product (about 3 minutes).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path

import launching
import pytest

HERE = Path(__file__).parent
FAULTY = HERE / "programs" / "faulty.py"
WITHIN = 5.0  # seconds from the fault to the end of the job
STALL_TIMEOUT = 3.0

REPORT = re.compile(r"\[\d+/\d+\] error ")
INIT = r"\[\d/{n}\] error before init: RankFailedError: rank 1 "
BEFORE, MIDDLE = r"\[1/{n}\] error before init: ", r"\[1/{n}\] error in step 3: "
DIED = r"\[\d/{n}\] error in step [23]: rank 1 died: its process ended without a word"
LEFT = r"\[\d/{n}\] error in step 3: rank 1 left while rank \d is in step 3 \(all_reduce\)"
VANISHED = INIT + r"ended before mpdp.init\(\) without a word"
ABSENT = INIT + r"left before mpdp.init\(\) while ranks? \d(, \d)? waits?"
LATE = (
    r"\[\d/{n}\] error before init: StallError: mpdp.init: expected all {n} ranks .* got no word from rank 1"
)
OTHERS = r"(?m)^\[1/\d\] info the other ranks were then: ranks? 0(, 2)? in step 3"
STALLED = MIDDLE + r"stalled: rank 1, step 3, in no collective \(rank \d waits for more than 3 s\)"

# fault -> (report before init, report in mid-training)
FAULTS = {
    "raise": (BEFORE + "ValueError: a bad sample", MIDDLE + "ValueError: a bad sample"),
    "raise_in_thread": (
        BEFORE + r"ValueError: a bad sample \(in thread 'loader'\)",
        MIDDLE + r"ValueError: a bad sample \(in thread 'loader'\)",
    ),
    "exit_0": (ABSENT, LEFT),
    "exit_3": (ABSENT, LEFT),
    "return": (ABSENT, LEFT),
    "os_exit_0": (VANISHED, DIED),
    "os_exit_3": (VANISHED, DIED),
    "kill": (VANISHED, DIED),
    "crash": (VANISHED, DIED),
    "stall": (LATE, STALLED),
    "interrupt": (BEFORE + "KeyboardInterrupt", MIDDLE + "KeyboardInterrupt"),
}
# The launcher itself sees such an end and kills the survivors within milliseconds: their report is best
# effort, and `mpdp run` names the rank where they do not get to it.
SEEN_BY_LAUNCHER = ("os_exit_0", "os_exit_3", "kill", "crash")

TABLE = [
    ("raise", "before", 2, "mpirun"),
    ("raise", "middle", 3, "mpdp run"),
    ("raise_in_thread", "before", 3, "mpdp run"),
    ("raise_in_thread", "middle", 2, "mpirun"),
    ("exit_0", "before", 2, "mpdp run"),
    ("exit_0", "middle", 3, "mpirun"),
    ("exit_3", "before", 3, "mpirun"),
    ("exit_3", "middle", 2, "mpdp run"),
    ("return", "before", 3, "mpirun"),
    ("return", "middle", 2, "mpdp run"),
    ("os_exit_0", "before", 2, "mpirun"),
    ("os_exit_0", "middle", 3, "mpdp run"),
    ("os_exit_3", "before", 3, "mpdp run"),
    ("os_exit_3", "middle", 2, "mpirun"),
    ("kill", "before", 2, "mpdp run"),
    ("kill", "middle", 3, "mpirun"),
    ("crash", "before", 3, "mpirun"),
    ("crash", "middle", 2, "mpdp run"),
    ("stall", "before", 2, "mpirun"),
    ("stall", "middle", 3, "mpdp run"),
    ("interrupt", "before", 3, "mpirun"),
    ("interrupt", "middle", 2, "mpdp run"),
]


def judge(result, fault, when, n, form, family):
    """Return what is wrong with the end of a job, as a list of sentences."""
    wrong = []
    reports = len(REPORT.findall(result.output))
    pattern = FAULTS[fault][when == "middle"].format(n=n)
    best_effort = fault in SEEN_BY_LAUNCHER
    within = WITHIN + (STALL_TIMEOUT if fault == "stall" else 0)
    if result.timed_out or result.seconds > within:
        wrong.append(f"took {result.seconds:.1f} s, more than {within:g} s")
    lost_by_mpich = fault == "os_exit_0" and when == "middle" and form == "mpirun" and family == "mpich"
    if result.rc == 0 and not lost_by_mpich:
        wrong.append("status 0")
    if result.orphans:
        wrong.append(f"{len(result.orphans)} processes left")
    if not re.search(pattern, result.output) and not best_effort:
        wrong.append(f"no report like {pattern}")
    most = n if (fault, when) == ("stall", "middle") else 1  # there each rank says where it is
    if fault.startswith("raise") and when == "middle" and not re.search(OTHERS, result.output):
        wrong.append("no word of where the others were")
    if reports > most:
        wrong.append(f"{reports} reports")
    if result.output.count("Traceback (most recent call last)") > 1:
        wrong.append("several tracebacks")
    if form == "mpdp run" and not re.search("mpdp run: rank . (failed|ended|was the first)", result.output):
        wrong.append("no word of mpdp run")
    return wrong


def run(job, fault, when, n, form, transport="auto", nodes=None):
    environ = {"FAULTY_TIMEOUT": timeout_of(fault), "MPDP_TRANSPORT": transport, "MPDP_NODES": nodes}
    return job(FAULTY, fault, when, n=n, form=form, environ=environ)


def timeout_of(fault):
    return str(STALL_TIMEOUT if fault == "stall" else 300)


@pytest.mark.parametrize("fault, when, n, form", TABLE, ids=["-".join(map(str, row)) for row in TABLE])
def test_one_rank_fails(job, fault, when, n, form):
    result = run(job, fault, when, n, form)
    wrong = judge(result, fault, when, n, form, _family())
    assert not wrong, f"{wrong}: {result}"


@pytest.mark.parametrize(
    "fault, n, form",
    [("raise", 3, "mpirun"), ("exit_0", 2, "mpdp run"), ("kill", 3, "mpdp run"), ("stall", 2, "mpirun")],
)
def test_one_rank_fails_while_the_others_are_inside_mpi(job, fault, n, form):
    result = run(job, fault, "middle", n, form, "mpi")
    wrong = judge(result, fault, "middle", n, form, _family())
    assert not wrong, f"{wrong}: {result}"


@pytest.mark.parametrize(
    "fault, n, form",
    [("raise", 3, "mpirun"), ("exit_0", 3, "mpdp run"), ("kill", 3, "mpdp run"), ("stall", 3, "mpirun")],
)
def test_one_rank_fails_while_the_others_are_inside_two_levels(job, fault, n, form):
    """Some wait for memory of their node, others inside MPI."""
    result = run(job, fault, "middle", n, form, "two_level", "2")
    wrong = judge(result, fault, "middle", n, form, _family())
    assert not wrong, f"{wrong}: {result}"


@pytest.mark.parametrize("transport, nodes", [("auto", None), ("mpi", None), ("two_level", "2")])
@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
def test_no_rank_fails(job, form, transport, nodes):
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": nodes}
    result = job(FAULTY, "nothing", "middle", n=3, form=form, environ=environ).check()
    assert result.results == [{"steps": 6, "size": 3}] * 3
    assert not REPORT.search(result.output)


@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
def test_a_script_that_only_imports_mpdp_ends_in_order(job, form, tmp_path):
    script = tmp_path / "only_import.py"
    script.write_text("import mpdp.guard\nmpdp.guard.install()\n")
    result = job(script, n=3, form=form).check()
    assert not REPORT.search(result.output)


@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
def test_a_forked_child_ends_without_ending_mpi(job, form):
    """Its own MPI_Finalize would hang (Open MPI) or break that of its rank (MPICH)."""
    result = job(HERE / "programs" / "forked.py", n=2, form=form).check()
    assert result.output.count("finished") == 2 and not REPORT.search(result.output), result


def test_a_script_without_mpdp_ends_in_order(job, tmp_path):
    script = tmp_path / "no_mpdp.py"
    script.write_text("print('hello')\n")
    assert job(script, n=2, form="mpdp run").check().output.count("hello") == 2


@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
def test_all_ranks_keep_their_own_status_when_nobody_is_needed(job, form):
    result = job(FAULTY, "exit_3", "end", n=2, form=form, environ={"FAULTY_RANK": "all"})
    assert result.rc == 3 and not REPORT.search(result.output), result


def test_an_error_that_all_ranks_raise_is_printed_by_rank_0(job):
    result = job(FAULTY, "raise_on_all_ranks", "middle", n=3, environ={"FAULTY_RANK": "all"})
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert re.findall(
        r"\[(\d)/3\] error in step 3: RuntimeError: layouts differ \(on all ranks\)", result.output
    ) == ["0"]
    assert result.output.count("Traceback (most recent call last)") == 1


def test_no_collective_is_entered_after_a_failure(job):
    result = job(FAULTY, "fail_and_clean_up", "middle", n=2)
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert len(REPORT.findall(result.output)) == 1 and result.output.count("Traceback") == 1, result
    assert result.output.index("error in step 3: ValueError") < result.output.index(
        "no collective after a failure"
    )


def test_a_reported_failure_ends_the_job_although_the_program_goes_on(job):
    result = job(FAULTY, "fail_and_go_on", "middle", n=2)
    assert result.rc != 0 and result.seconds < WITHIN and len(REPORT.findall(result.output)) == 1, result


def test_a_forked_worker_does_not_hide_a_death(job):
    result = job(FAULTY, "die_with_workers", "middle", n=2, form="mpdp run")
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert re.search(DIED.format(n=2), result.output) or "rank 1 was the first to end" in result.output, (
        result
    )


def test_an_error_that_another_hook_prints_ends_the_job(job):
    result = job(FAULTY, "raise_under_another_hook", "middle", n=2)
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert "another hook: a bad sample" in result.output


def test_a_rank_behind_a_wrapper_that_ends_before_init_is_missed(job, tmp_path):
    wrapped = tmp_path / "wrapped.py"
    wrapped.write_text(
        "import subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, {str(FAULTY)!r}, 'os_exit_0', 'before']).returncode)\n"
    )
    result = job(wrapped, n=2)
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert re.search(VANISHED.format(n=2), result.output), result


def test_a_rank_that_is_gone_inside_init_does_not_hold_the_others_for_ever(job):
    """MPI_Init waits for it, holding the GIL: nothing in Python could say so."""
    result = job(FAULTY, "os_exit_0", "inside", n=2, environ={"FAULTY_TIMEOUT": str(STALL_TIMEOUT)})
    assert result.rc != 0 and result.seconds < WITHIN + STALL_TIMEOUT and not result.orphans, result
    assert "Timeout (0:00:03)!" in result.output and "in init" in result.output, result


def test_the_end_of_a_rank_is_seen_while_another_is_not_yet_in_init(job):
    result = job(FAULTY, "os_exit_3", "before", n=2, form="mpdp run", environ={"FAULTY_DELAY": "60"})
    assert result.rc != 0 and result.seconds < WITHIN, result
    assert re.search("mpdp run: rank 1 (ended without a word|was the first to end)", result.output), result


@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), (signal.SIGTERM, None), (signal.SIGHUP, None), (signal.SIGKILL, -9)],
)
def test_a_signal_to_mpdp_run_ends_all(job, number, code):
    def send(process):
        launching.wait_for_fault(process)
        process.send_signal(number)

    result = job(FAULTY, "stall", "middle", n=2, form="mpdp run", after=send, environ={"FAULTY_RANK": "all"})
    assert result.rc != 0 and result.seconds < WITHIN and not result.orphans, result
    assert code is None or result.rc == code, result


def test_the_death_of_the_launcher_ends_the_ranks(job):
    def kill(process):
        launching.wait_for_fault(process)
        process.kill()
        deadline = time.monotonic() + WITHIN
        while len(launching.marked(process.mark)) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)

    result = job(FAULTY, "stall", "middle", n=2, after=kill, environ={"FAULTY_RANK": "all"})
    assert not result.orphans, result


def _family():
    return launching.mpi()[0]


def _print_table():
    family = _family()
    print(f"| {family}: fault | when | n | form | seconds | status | reports | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    bad = 0
    for fault, when, n, form in itertools.product(
        FAULTS, ("before", "middle"), (2, 3), ("mpirun", "mpdp run")
    ):
        result = run(launching.launch, fault, when, n, form)
        wrong = judge(result, fault, when, n, form, family)
        bad += bool(wrong)
        reports = len(REPORT.findall(result.output))
        row = (fault, when, n, form, f"{result.seconds:.1f}", result.rc, reports, "; ".join(wrong))
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        if wrong and os.environ.get("SHOW"):
            print(result)
    return 1 if bad else 0


@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_mistake_that_all_ranks_make_is_reported_once(job, form, when):
    result = job(FAULTY, "raise", when, n=3, form=form, environ={"FAULTY_RANK": "all"})
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    reports = len(REPORT.findall(result.output))
    if when == "middle":
        assert reports == 1 and "[0/3] error" in result.output, f"{result}"
    else:  # ranks start at different times and do not know of one another yet
        assert 1 <= reports <= 3, f"{result}"


if __name__ == "__main__":
    sys.exit(_print_table())
