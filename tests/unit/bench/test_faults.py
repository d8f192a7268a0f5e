"""The fault driver's own judgement: what it plans, and that nothing wrong passes it."""

import dataclasses
import json
import re

import numpy as np
import pytest

import mpdp
from mpdp import nn, optim, threads
from mpdp.bench.faults import command, trial
from mpdp.bench.faults.cost import WithoutChecks
from mpdp.bench.faults.jobs import Ended
from mpdp.bench.faults.kinds import KINDS
from mpdp.bench.faults.moment import MARK, Fault
from mpdp.bench.faults.trial import Trial
from mpdp.training import checkpoint

CPU = [name for name, kind in KINDS.items() if kind.device == "cpu"]
RAISED = "[1/2] error in step 3: ValueError: a bad loss\nTraceback ...\n"
DIED = "[0/2] error in step 3: rank 1 died: its process ended without a word while rank 0 is in step 3\n"


def drawn(number):
    return Trial.drawn(number, 7, CPU, ["mpich", "openmpi"], [2, 3, 4])


def test_a_plan_is_a_function_of_its_seed_and_covers_every_way():
    trials = [drawn(number) for number in range(12 * len(CPU))]
    assert trials == [drawn(number) for number in range(12 * len(CPU))]
    assert drawn(0) != Trial.drawn(0, 8, CPU, ["mpich", "openmpi"], [2, 3, 4])
    for kind in CPU:
        own = [t for t in trials if t.fault.kind == kind]
        assert {(t.family, t.form) for t in own} == {
            (family, form) for family in ("mpich", "openmpi") for form in ("mpirun", "mpdp run")
        }
        assert {t.n for t in own} == {2, 3, 4}
        assert {t.fault.loop for t in own} == set(KINDS[kind].loops)
        assert all(0 <= t.fault.rank < t.n for t in own)
        assert all(0 <= t.fault.step <= KINDS[kind].latest or KINDS[kind].moments == ("end",) for t in own)


@pytest.fixture
def judged(tmp_path):
    """Judge a job that ended 0.5 s after the fault: ``judged("loss", output, status=0)``."""

    def judged(kind, output, came=True, form="mpirun", family="openmpi", step=3, **ended):
        if came:
            (tmp_path / MARK).write_text("1000.0")
        fault = Fault(kind, 1, step, 0.0, "fit", str(tmp_path), 5.0)
        how = {"status": 1, "output": output, "ended": 1000.5, "late": False, "orphans": 0} | ended
        return trial.judge(Trial(0, fault, 2, family, form), Ended(**how), 998.0)

    return judged


def test_an_end_as_promised_is_not_wrong(judged):
    outcome = judged("loss", RAISED)
    assert (outcome.wrong, outcome.seconds, outcome.reported) == ([], 0.5, True)


@pytest.mark.parametrize(
    ("output", "options", "sentence", "flag"),
    [
        (RAISED, {"status": 0}, "status 0 although a rank did not finish", "false_success"),
        (RAISED, {"late": True, "status": -15}, "hung for", "hung"),
        (RAISED, {"orphans": 2}, "2 processes outlived the job", "orphans"),
        (RAISED, {"ended": 1011.0}, "took 11.0 s, more than 10 s", None),
        (RAISED, {"came": False}, "the fault never came", None),
        ("", {"came": False, "status": 0}, "the fault never came", None),
        (RAISED + RAISED, {}, "2 reports", None),
        ("Killed\n", {}, r"no report like ", None),
        (RAISED.replace("[1/2]", "[0/2]"), {}, r"no report like ", None),
        (RAISED.replace("ValueError", "KeyError"), {}, r"no report like ", None),
    ],
)
def test_each_broken_promise_is_found(judged, output, options, sentence, flag):
    outcome = judged("loss", output, **options)
    assert len(outcome.wrong) == 1 and re.match(sentence, outcome.wrong[0]), outcome.wrong
    flags = [name for name in ("false_success", "hung", "orphans", "lost") if getattr(outcome, name)]
    assert flags == ([] if flag is None else [flag])


def test_a_launcher_that_kills_the_survivors_first_is_forgiven_the_report_alone(judged):
    assert judged("kill", DIED).reported
    silent = judged("kill", "")
    assert silent.wrong == [] and not silent.reported
    assert judged("kill", "", form="mpdp run").wrong  # there it names the rank itself
    assert not judged("kill", "x\nmpdp run: rank 1 was the first to end", form="mpdp run").wrong
    assert judged("kill", "", status=0).false_success


def test_the_status_that_mpich_makes_of_os_exit_0_is_counted_apart(judged):
    outcome = judged("os_exit_0", DIED, status=0, family="mpich")
    assert outcome.lost_status and not outcome.false_success and outcome.wrong == []
    for other in ({"form": "mpdp run"}, {"family": "openmpi"}):
        assert judged("os_exit_0", DIED, status=0, **({"family": "mpich"} | other)).false_success


def test_a_stall_has_its_timeout_on_top_and_each_rank_reports(judged):
    stalled = "[{}/2] error in step 3: stalled: rank 0, step 3, all_reduce (rank 0 waits for more than 5 s)\n"
    assert not judged("spin", stalled.format(0) + stalled.format(1), ended=1014.0).wrong
    assert judged("spin", stalled.format(0), ended=1016.0).wrong == ["took 16.0 s, more than 15 s"]


def write(run, step, value):
    checkpoint.write(run / "checkpoints", step, {"weights/a": np.full(4, value, "float32")}, {"step": step})


@pytest.mark.parametrize(
    ("step", "value", "sentence"),
    [
        (6, 1.0, None),
        (6, 1.0000001, "the checkpoint differs from the undisturbed run in weights/a"),
        (7, 1.0, "the checkpoint is of update 7, where the undisturbed run has none"),
    ],
)
def test_a_checkpoint_is_compared_bit_by_bit(tmp_path, step, value, sentence):
    write(tmp_path / "whole", 6, 1.0)
    write(tmp_path / "left", step, value)
    wrong = []
    assert trial._same(tmp_path / "left", tmp_path / "whole", wrong, "the checkpoint") == step
    assert wrong == ([] if sentence is None else [sentence])


def test_a_torn_checkpoint_is_found(tmp_path):
    for run in ("whole", "left"):
        write(tmp_path / run, 3, 1.0)
        write(tmp_path / run, 6, 2.0)
    (part,) = (tmp_path / "left" / "checkpoints").glob("step-*6*/*.safetensors")
    part.write_bytes(part.read_bytes()[:-2])
    wrong = []
    assert trial._same(tmp_path / "left", tmp_path / "whole", wrong, "the checkpoint") == 3
    assert len(wrong) == 1 and "the checkpoint: " in wrong[0]


def test_rows_are_kept_and_a_plan_goes_on_where_it_was(tmp_path):
    path, plan = tmp_path / "rows", {"seed": 1}
    assert command._kept(path, plan) == []
    for number in range(3):
        command._keep(path, {"number": number})
    with open(path, "a") as file:
        file.write('{"number": 3, "ki')  # killed while it wrote
    assert [row["number"] for row in command._kept(path, plan)] == [0, 1, 2]
    command._keep(path, {"number": 3})
    assert len(command._kept(path, plan)) == 4
    assert command._kept(path, {"seed": 2}) == []


def test_the_table_counts_by_group_and_says_what_is_left():
    fault = Fault("kill", 1, 3, 0.0, "fit", "", 5.0)
    outcome = trial.Outcome(Trial(0, fault, 2, "mpich", "mpirun"), 0.25, 9)
    rows = [
        outcome.row(),
        dataclasses.replace(outcome, seconds=4.0, wrong=["x"], lost=True, output="...").row(),
    ]
    assert json.loads(json.dumps(rows)) == rows and "output" not in rows[0] and rows[1]["output"] == "..."
    result = command.summary(rows) | {"asked": 5}
    assert result["lost_checkpoints"] == result["wrong"] == 1 and result["rows_wrong"] == [rows[1]]
    lines = command.table(result)
    assert "| kill | 2 | 2.12 | 4.00 | 4.00 | 0 | 0 | 0 | 1 | 2 | 1 |" in lines
    assert lines[-1] == "3 faults are left; run it again to go on"
    assert "WRONG: x" in command.line(rows[1])


def test_an_unknown_kind_is_a_usage_error(capsys):
    from mpdp import bench

    with pytest.raises(SystemExit) as error:
        bench.main(["faults", "--kinds", "kill,lightning"])
    assert error.value.code == 2 and "--kinds: expected some of dataset,transform," in capsys.readouterr().err


def test_it_starts_its_jobs_itself(monkeypatch, capsys):
    from mpdp import bench, guard
    from mpdp.launch import Announcement

    monkeypatch.setattr(guard.current, "announcement", Announcement(2, 0, 0, 2, "hydra"))
    with pytest.raises(SystemExit) as error:
        bench.main(["faults", "--quick"])
    assert (
        error.value.code == 2
        and "faults: expected no launcher, got one of 2 ranks" in capsys.readouterr().err
    )


def test_steps_without_checks_compute_the_same_and_notice_nothing():
    x = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    y = np.arange(8) % 3

    def body():
        mpdp.seed(0)
        trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
        for _ in range(3):
            trainer.step((x, y))
        checked = trainer.model.weight.data.copy()
        mpdp.seed(0)
        trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
        with WithoutChecks(trainer):
            for _ in range(3):
                trainer.step((x, y))
        same = np.array_equal(trainer.model.weight.data, checked)
        with WithoutChecks(trainer):
            trainer.step((np.full_like(x, np.nan), y))
        unnoticed = bool(np.isnan(trainer.model.weight.data).all())
        trainer.model.weight.data[...] = checked
        with pytest.raises(mpdp.errors.NonFiniteError):
            trainer.step((np.full_like(x, np.nan), y))
        return same, unnoticed

    assert threads.run(body, 2) == [(True, True)] * 2
