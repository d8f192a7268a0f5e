"""The harness of ``mpdp bench contention``: it tells a lock from none, and refuses to where the cores are busy."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from mpdp.bench import main
from mpdp.bench.contention import arms, control, figures, loops, rounds, rule, workers
from mpdp.bench.contention.channel import Channel
from mpdp.bench.contention.targets import Launch, Target
from mpdp.bench.contention.workers import Arm, Processes, Workers, environment
from mpdp.errors import CommunicationError

pytestmark = pytest.mark.skipif(isinstance(loops.loops(), str), reason="no C compiler")
WANTED = 3


def nap(locked, microseconds=1000):
    """A mock that sleeps, so that it tells a lock from none on busy cores too."""
    return Launch("sleep", microseconds=microseconds, locked=locked)


@pytest.fixture
def crew():
    made = []

    def make():
        made.append(Workers(0, {"processes": Processes(environment(mps=False))}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def measure(crew, launch, free, tries=1):
    """Run the verdict's arms with a mock, and decide; again where not even processes, which share nothing, scale.

    Warm-ups under a lock make starts late; so rates are those from the common start, as on several GPUs.
    """
    planned = [
        Arm(who, "c", launch, k, arms.own_name(launch)) for who in ("pthreads", "processes") for k in (1, 2)
    ]
    threads, processes = arms.verdict_rows(0, False, launch)
    made = crew()
    for _ in range(tries):
        said = []
        run = rounds.Rounds(
            made,
            planned,
            free,
            [],
            repetitions=WANTED,
            seconds=0.0,
            keep=said.append,
            until=time.monotonic() + 60,
        )
        samples = run.run()
        assert said == samples
        rows = figures.summary(samples)
        (of_processes,) = (row for row in rows if (row["row"], row["k"]) == (processes, 2))
        if of_processes["accepted"] and 1.8 < of_processes["scaling"][0] < 2.2:
            break
    return rows, rule.decide(
        rows, threads=threads, processes=processes, wanted=WANTED, gpus=2, machine="a mock"
    )


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(rounds, "LATE", 10.0)  # the tests' machine may be busy, and sleeping needs no core


def test_a_known_lock_is_found(crew, patient):
    rows, verdict = measure(crew, nap(locked=True), lambda k: 1.0, tries=4)
    assert verdict.word == "lock" and verdict.line.startswith(
        "the driver's lock is real here: 2 threads launch"
    )
    assert {row["accepted"] for row in rows} == {WANTED}


def test_no_lock_is_no_contention(crew, patient):
    rows, verdict = measure(crew, nap(locked=False), lambda k: 1.0, tries=4)
    assert verdict.word == "no contention" and verdict.line.startswith("no contention here: 2 threads launch")
    told = rule.decide(rows, threads="", processes="", wanted=WANTED, gpus=0, machine="a mock")
    assert "the launches here are mocks" in told.open_questions[0]


def test_busy_cores_are_no_verdict(crew, patient):
    rows, verdict = measure(crew, nap(True, 50), lambda k: 0.5)
    assert verdict.line == "undecided (cores busy)"
    assert {(row["accepted"], row["refused"]) for row in rows} == {(0, 4 * WANTED)}


def test_a_late_worker_refuses_the_repetition(crew, monkeypatch):
    monkeypatch.setattr(rounds, "LATE", -1.0)
    _, verdict = measure(crew, nap(False, 50), lambda k: 1.0)
    assert verdict.line == "undecided (cores busy)"


def test_threads_that_wait_for_the_gil_are_not_late(crew, monkeypatch):
    monkeypatch.setattr(rounds, "LATE", -1.0)
    planned = [Arm("threads", loop, nap(False, 50), 2, "a mock") for loop in ("held", "c")]
    run = rounds.Rounds(
        crew(), planned, lambda k: 1.0, [], repetitions=1, seconds=0.0, keep=lambda sample: None,
        until=time.monotonic() + 60,
    )  # fmt: skip
    accepted = {sample["loop"]: sample["accepted"] for sample in run.run()}
    assert accepted == {"held": True, "c": False}


def test_the_control_sees_other_work():
    cpus = control.cores_in_order()
    free = control.Control(cpus)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(cpus))]
    try:
        time.sleep(0.3)
        shares = [free(len(cpus)) for _ in range(5)]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert min(shares) < control.LEAST


@pytest.mark.parametrize("compiler", [True, False])
def test_threads_without_cores_are_seen(monkeypatch, compiler):
    if not compiler:
        monkeypatch.setattr(control.c, "loops", lambda: "no C compiler")
    cpus = control.cores_in_order()
    free = control.Control(cpus)
    assert (free._loops is not None) == compiler
    assert 0 < free(8 * len(cpus)) < control.LEAST / 4 < max(free(1) for _ in range(5)) <= 1


def test_a_look_is_repeated_until_the_cores_are_free():
    looks = iter([0.5, 0.9, 0.95, 0.2])
    assert control.until_free(lambda k: next(looks), 2) == 0.95
    looks = iter([0.5] * control.TRIES)
    assert control.until_free(lambda k: next(looks), 2) == 0.5 and list(looks) == []


def test_neighbours_that_are_one_core_are_taken_apart():
    def rate(cpus):
        return 1.1 if {cpu // 2 for cpu in cpus} == {2} else 2.0

    assert control.neighbours_apart(range(4, 10), rate) == [4, 6, 8, 5, 7, 9]
    assert control.neighbours_apart(range(4, 10), lambda cpus: 2.0) == list(range(4, 10))
    assert control.neighbours_apart([4, 5], rate) == [4, 5]
    assert sorted(control.neighbours_apart(control.cores_in_order() * 2)) == sorted(
        control.cores_in_order() * 2
    )


def test_cores_are_those_in_reach_once_each():
    assert sorted(control.cores_in_order()) == sorted(os.sched_getaffinity(0))
    assert control.cores_in_order([7000, 7001]) == [7000, 7001]


@pytest.mark.parametrize(
    ("who", "loop"),
    [
        ("one", "python"),
        ("threads", "python"),
        ("threads", "held"),
        ("threads", "c"),
        ("mutex", "python"),
        ("mutex", "c"),
        ("submitter", "python"),
        ("pthreads", "c"),
        ("pthreads mutex", "c"),
        ("processes", "python"),
        ("processes", "c"),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_each_worker_does_its_launches(crew, who, loop, k):
    launch = Launch("spin", microseconds=20)
    run = crew().run(Arm(who, loop, launch, k, "mock"), 50, [-1] * k)
    assert len(run.timings) == k
    for timing in run.timings:
        assert run.start_at <= timing.started < timing.ended
        assert len(timing.latencies) == 50 and timing.latencies.min() >= 20_000
        assert timing.busy >= 50 * 20_000
    assert run.per_second <= k * 50_000 and run.enqueued_per_second <= k * 50_000
    assert run.late >= 0
    if who == "one":
        assert run.timings[0].busy >= k * 50 * 20_000


def test_a_target_counts_what_the_thread_used():
    target = Target(Launch("sleep", microseconds=100), 0)
    timing = target.from_c(30, 0, False)
    # A sleep does not leave the core where its time was over before it began.
    assert timing.switches[0] >= 15 and timing.cpu < 0.03
    assert target.from_python(30, 0, True).switches[0] >= 15


def test_a_worker_that_fails_is_named(crew):
    with pytest.raises(CommunicationError, match=r"worker 0: expected an answer, got \w+: "):
        crew().run(Arm("processes", "c", Launch("kernel"), 1, "null kernel"), 5, [-1])
    said = []
    run = rounds.Rounds(
        crew(), [Arm("pthreads", "c", Launch("kernel"), 1, "null kernel")], lambda k: 1.0, [], repetitions=1,
        seconds=0.0, keep=said.append, until=time.monotonic() + 9, say=said.append,
    )  # fmt: skip
    assert run.run() == []
    assert said[0].startswith("left out: null kernel: threads of C, C loop, k = 1: ")


def test_a_process_that_dies_is_an_error_with_what_it_printed():
    channel = Channel(
        [sys.executable, "-c", "print('its last words'); raise SystemExit(4)"], dict(os.environ), "a job"
    )
    with pytest.raises(
        CommunicationError,
        match=r"(?s)a job: expected an answer, got its end with status 4[\s\S]*its last words",
    ):
        channel.connect()
    channel.close()
    silent = Channel(
        [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), "a job", seconds=0.4
    )
    with pytest.raises(CommunicationError, match=r"got none within 0\.4 s"):
        silent.connect()
    silent.close()
    assert silent.process.poll() is not None


def test_no_compiler_is_said(monkeypatch):
    loops.loops.cache_clear()
    monkeypatch.setattr(loops.shutil, "which", lambda name: None)
    try:
        assert loops.loops() == "no C compiler (cc, gcc, clang)"
        with pytest.raises(RuntimeError, match=r"no C compiler \(cc, gcc, clang\)"):
            loops.library("locks")
    finally:
        loops.loops.cache_clear()
    planned = arms.plan("full", 1, (1, 2), True, False, True)
    assert {arm.launch.kind for arm in planned} == {"cupy"}
    verdict = rule.decide(
        [], threads="", processes="", wanted=3, gpus=1, machine="m", missing="no C compiler"
    )
    assert (verdict.word, verdict.line) == ("undecided", "undecided (no C compiler)")


def test_a_library_is_compiled_into_the_cache_and_elsewhere_where_it_must(monkeypatch, tmp_path):
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(loops.tempfile, "tempdir", str(elsewhere))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert loops.library("launches") == loops.library("launches")
    assert loops.library("launches").parent == tmp_path / "cache" / "mpdp"
    assert not list(elsewhere.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert loops.library("launches").parent.parent == elsewhere


# -- the rule


def row(name, k, scaling, accepted=9, p99=5.0, switches=0, enqueued=None):
    def told(value):
        return None if k == 1 else (value, value - 0.1, value + 0.1)

    return {
        "row": name, "loop": "c", "k": k, "accepted": accepted, "scaling": told(scaling),
        "enqueued_scaling": told(scaling if enqueued is None else enqueued), "p99_us": p99,
        "voluntary_switches": switches,
    }  # fmt: skip


def decide(threads, processes, gpus=4, k=4, **of_threads):
    rows = [row("t", 1, 1), row("t", k, threads, **of_threads), row("p", 1, 1), row("p", k, processes)]
    return rule.decide(rows, threads="t", processes="p", wanted=9, gpus=gpus, machine="m")


@pytest.mark.parametrize(
    ("threads", "processes", "more", "word", "line"),
    [
        (
            3.2,
            3.9,
            {},
            "no contention",
            r"no contention here: 4 threads launch 3\.20 times \[3\.10, 3\.30\] of one",
        ),
        (3.1, 3.9, {"p99": 10.0}, "lock", "the driver's lock is real here"),
        (0.8, 3.6, {"switches": 7}, "lock", "the driver's lock is real here"),
        (0.8, 3.6, {}, "undecided", r"undecided \(threads are slower, but are not seen to wait\)"),
        (0.8, 3.5, {"p99": 99.0}, "undecided", r"undecided \(processes do not scale either\)"),
        (0.8, 3.9, {"accepted": 8}, "undecided", r"undecided \(cores busy\)"),
    ],
)
def test_the_rule_is_fixed(threads, processes, more, word, line):
    import re

    verdict = decide(threads, processes, **more)
    assert verdict.word == word and re.match(line, verdict.line) and verdict.open_questions == ()


def test_on_one_gpu_the_rate_of_enqueueing_counts():
    assert decide(1.0, 1.0, gpus=1, enqueued=3.9, k=4).word == "no contention"
    verdict = decide(1.0, 1.0, gpus=1)
    assert verdict.word == "undecided" and "one GPU cannot decide" in verdict.open_questions[0]


def test_fewer_workers_decide_where_more_have_no_cores():
    rows = [
        row("t", 1, 1),
        row("t", 2, 2),
        row("t", 8, 1, accepted=0),
        row("p", 1, 1),
        row("p", 2, 2),
        row("p", 8, 1),
    ]
    verdict = rule.decide(rows, threads="t", processes="p", wanted=9, gpus=1, machine="m")
    assert verdict.line.startswith("no contention here: 2 threads")
    verdict = rule.decide(rows[:1], threads="t", processes="p", wanted=9, gpus=1, machine="m")
    assert verdict.line.startswith("undecided (one core")


def test_the_locked_share_follows_from_the_scaling():
    rows = [row("t", 1, 1), row("t", 4, 4), row("m", 4, 1), row("b", 4, 2, accepted=0)]
    rows.append({**row("g", 4, 2, enqueued=4), "loop": "held"})
    assert rule.readings(rows, 4) == [
        "t: 4 workers enqueue 4.00 times as fast as one, locked share 0.00",
        "m: 4 workers enqueue 1.00 times as fast as one, locked share 1.00",
        "g: 4 workers complete 2.00 times as fast as one, locked share 0.33",
    ]


# -- figures


def test_an_interval_holds_the_ratio_and_repeats():
    random = np.random.default_rng(1)
    above, below = random.normal(4, 0.1, 9), random.normal(2, 0.1, 9)
    value, low, high = figures.interval(above, below)
    assert low <= value <= high and 1.8 < low < 2 < high < 2.2
    assert figures.interval(above, below) == (value, low, high)


def test_a_histogram_holds_every_launch():
    latencies = [np.array([50.0, 150.0, 1000.0]), np.array([1001.0, 1e6])]  # ns
    found = figures.latency_figures(latencies)
    counts, edges = found["histogram"], figures.histogram_edges(len(found["histogram"]))
    assert sum(counts) == 5 and counts[0] == 1 and found["max_us"] == 1000.0
    for value in (0.15, 1.001, 1000.0):
        assert counts[int(np.searchsorted(edges, value * 1.0001) - 1)] >= 1
    assert found["p50_us"] == 1.0


def test_arms_of_an_extent_are_there():
    def rows(extent, gpus, mps=False):
        return {arm.row for arm in arms.plan(extent, gpus, (1, 2), mps, True, gpus > 0)}

    for gpus, mps in ((0, False), (1, False), (1, True), (4, True)):
        quick, default, full = (rows(extent, gpus, mps) for extent in ("quick", "default", "full"))
        assert quick < default < full
        assert set(arms.verdict_rows(gpus, mps)) <= quick
    assert workers.row_name("one", "python", "null kernel") in rows("default", 1)


def test_wrong_options_are_refused(capsys):
    for words, message in (
        (["--gpus", "0"], "--gpus: expected a number of at least 1, got '0'"),
        (["--quick", "--full"], "not allowed with"),
        (["--device", "tpu"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as raised:
            main(["contention", *words])
        assert raised.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("busy", [False, True])
def test_a_plot_is_drawn_whatever_was_refused(crew, patient, tmp_path, busy):
    pytest.importorskip("matplotlib")
    from mpdp.bench.plot_contention import plot_contention

    rows, verdict = measure(crew, nap(False, 50), lambda k: 0.0 if busy else 1.0)
    blocks = {"threads": [] if busy else [0.1, 0.2], "processes": [] if busy else [0.1, 0.1]}
    made = {"kind": "launch-bound", "blocks": blocks, "costs": {}}
    plot_contention(
        {"rows": rows, "steps": [made], "processor": "a mock", "verdict": verdict.line},
        str(tmp_path / "c.png"),
    )
    assert (tmp_path / "c.png").stat().st_size > 10_000
