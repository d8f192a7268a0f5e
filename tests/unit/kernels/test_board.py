"""The board of a captured step: what it takes from the host, what it decides, what it reports; on every device."""

from __future__ import annotations

import math

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp.kernels.board import Status
from mpdp.optim import SGD, AdamW

SPAN = 4096
SLOT = {
    "step": 7,
    "start": 3,
    "rows": 4,
    "applied": 0,
    "power": 8.0,
    "loss_scale": 1.0,
    "clip_norm": None,
    "seed": 0.125,
    "skips": False,
    "numbers": bytes(16),
    "sources": (),
}


def board_of(numbers=1, slots=4):
    return here.kernels.board(slots, numbers, 6, 4)


def decided(board, gradient, loss=6.0, count=4.0, apart=True, **slot):
    """Do one update of one micro-batch, and return its report."""
    board.write(**{**SLOT, **slot})
    board.begin((), 0)
    taken = put(np.float32(loss)), 1.0, count
    if apart:
        board.take(*taken, True)
    board.decide(put(gradient), SPAN, loss=None if apart else taken)
    update = int(host(board.words)[1]) - 1  # waits
    assert board.report(update + 1) is None
    return board.report(update)


def test_a_launch_takes_its_slot_and_its_arrays(device):
    rng = np.random.default_rng(0)
    board = board_of(3)
    arrays = [
        rng.normal(size=(4, 6)).astype("float32"),
        rng.integers(0, 9, size=4),
        rng.normal(size=(4, 3)).astype("float16"),
        rng.integers(0, 255, size=(4, 5)).astype("uint8"),
        rng.normal(size=(4, 1, 2)),
    ]
    targets = [xp.full(a.shape, 1, a.dtype) for a in arrays]
    for rows, at in ((4, 0), (3, 0), (4, 1)):  # the last from addresses that are a multiple of little
        sources = [put(np.concatenate((a[:1], a)))[at:][:rows] for a in arrays]
        numbers = np.arange(6.0)
        board.write(**{**SLOT, "rows": rows, "numbers": numbers.tobytes(), "sources": sources})
        board.begin(targets, 4)
        board.take(put(np.float32(1.0)), 1.0, 1.0, True)
        for target, source in zip(targets, sources):
            expected = np.zeros(target.shape, target.dtype)
            expected[:rows] = host(source)
            np.testing.assert_array_equal(host(target), expected)
        assert [int(host(a)) for a in (board.step, board.start, board.rows)] == [7, 3, rows]
        assert host(board.numbers).tolist() == [0.0, 1.0, 2.0] and float(host(board.seed)) == 0.125


def test_more_launches_than_slots(device):
    board = board_of(slots=2)
    for step in range(7):
        board.write(**{**SLOT, "step": step})
        board.begin((), 0)
        board.take(put(np.float32(0)), 1.0, 0.0, True)
        assert int(host(board.step)) == step


def test_sums_over_micro_batches(device):
    board = board_of()
    for i, (loss, count) in enumerate([(1.5, 3.0), (float("nan"), 0.0), (2.0, put(np.float64(5.0)))]):
        board.write(**SLOT)
        board.begin((), 0)
        board.take(put(np.float64(loss) if i == 2 else np.float32(loss)), 2.0, count, i == 0)
    assert host(board.record).tolist() == [7.0, 8.0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("clip", "apart"), [(None, True), (0.25, False), (1e9, True)])
def test_the_factor_has_the_bits_of_the_host(device, dtype, clip, apart):
    gradient = np.random.default_rng(1).normal(size=3 * SPAN).astype(dtype)
    board = board_of()
    report = decided(board, gradient, clip_norm=clip, loss_scale=4.0, count=3.0, apart=apart)
    assert int(host(board.words)[0]) == 1
    scale = 8.0 / 3.0 / 4.0
    norm = math.sqrt(float(here.kernels.squared_norm(put(gradient), SPAN))) * scale
    factor = scale if clip is None else scale * min(1.0, clip / (norm + 1e-6))
    assert float(host(board.scale)) == factor and int(host(board.apply)) == 1
    assert report.status == Status.APPLIED and not report.halted
    assert (report.loss_sum, report.counted, report.own_sum, report.bad, report.step) == (
        6.0,
        3.0,
        6.0,
        -1,
        7,
    )
    assert report.norm == (0.0 if clip is None and device.kind == "cpu" else norm)


def decided_in_parts(boards, gradients, **slot):
    """Do an update of ranks that have parts of the gradient, as :func:`decided`, and return their reports."""
    for board, gradient in zip(boards, gradients):
        board.write(**{**SLOT, **slot})
        board.begin((), 0)
        board.take(put(np.float32(6.0)), 1.0, 4.0, True)
        board.look(put(gradient), SPAN)
    total = sum(board.parts for board in boards)
    reports = []
    for board, gradient in zip(boards, gradients):
        board.parts[...] = total
        board.decide(put(gradient), SPAN)
        reports.append(board.report(int(host(board.words)[1]) - 1))
    return reports


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parts_of_a_gradient_decide_as_the_whole_does(device, dtype):
    gradient = np.random.default_rng(1).normal(size=7 * SPAN).astype(dtype)
    owners = np.array([0, 0, 1, 2, 2, 1, 1])  # of each span, and rank 3 has none
    boards = [board_of() for _ in range(4)]
    for rank, board in enumerate(boards):
        board.share(owners == rank, rank, len(boards))
        board.prime(put(gradient), SPAN)
    for spoiled in (None, (5 * SPAN + 3, np.nan), (3 * SPAN, np.inf)):
        whole, slot = gradient.copy(), {"clip_norm": 0.25, "skips": True}
        if spoiled is not None:
            whole[spoiled[0]] = spoiled[1]
            whole[-1] = np.nan
        parts = [np.where(np.repeat(owners == rank, SPAN), whole, np.inf).astype(dtype) for rank in range(4)]
        reports, alone = decided_in_parts(boards, parts, **slot), board_of()
        assert reports == [decided(alone, whole, **slot)] * 4
        assert reports[0].bad == (-1 if spoiled is None else spoiled[0])
        assert {float(host(board.scale)) for board in boards} == {float(host(alone.scale))}


@pytest.mark.parametrize("where", [0, 5000, 3 * SPAN - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_halts_the_board(device, where, value):
    gradient = np.ones(3 * SPAN, np.float32)
    board = board_of()
    assert decided(board, gradient, step=1).status == Status.APPLIED
    gradient[where:] = value
    report = decided(board, gradient, step=2)
    assert report.status == Status.GRADIENT_LOST and report.halted and (report.bad, report.step) == (where, 2)
    assert int(host(board.apply)) == 0
    after = decided(board, np.ones(3 * SPAN, np.float32), step=3)
    assert after.halted and after.step == 2 and int(host(board.apply)) == 0


def test_a_loss_that_is_not_finite_halts_the_board(device):
    board = board_of()
    report = decided(board, np.ones(SPAN, np.float32), loss=np.inf)
    assert report.status == Status.LOSS_LOST and report.halted and report.own_sum == np.inf


def test_skipped_and_empty_updates_do_not_halt(device):
    board, good = board_of(), np.ones(SPAN, np.float32)
    lost = np.full(SPAN, np.nan, np.float32)
    numbers = np.array([10.0, 11.0]).tobytes()
    found = [
        decided(board, lost, skips=True, numbers=numbers).status,
        decided(board, good, count=0.0, numbers=numbers).status,
        decided(board, good, numbers=numbers).status,
    ]
    assert found == [Status.SKIPPED, Status.NOTHING, Status.APPLIED]
    assert host(board.numbers).tolist() == [10.0]
    decided(board, good, numbers=numbers)  # one was applied since 0 were known
    assert host(board.numbers).tolist() == [11.0]


def test_float64_squares_may_overflow(device):
    gradient = np.full(SPAN, 1e200)
    with np.errstate(over="ignore"):
        report = decided(board_of(), gradient, clip_norm=1.0)
    assert report.status == Status.APPLIED and report.norm == np.inf


def test_chunks_are_signalled(device):
    board = board_of()
    board.write(**SLOT)
    board.begin((), 0)
    board.take(put(np.float32(1)), 1.0, 1.0, True)
    host(board.words)
    assert not board.signalled(0)
    board.signal(2)
    host(board.words)
    assert board.signalled(1) and board.signalled(2) and not board.signalled(3)
    board.write(**SLOT)
    assert not board.signalled(1)


def test_an_update_that_is_not_applied_changes_nothing(device):
    rng = np.random.default_rng(2)
    k = here.kernels
    for optimizer in (SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), AdamW(lr=0.1)):
        weights, gradient = (
            put(rng.normal(size=512).astype("float32")),
            put(rng.normal(size=512).astype("float32")),
        )
        state = [put(rng.uniform(size=512).astype("float32")) for _ in optimizer.slots]
        before = [host(a).copy() for a in (weights, *state)]
        for when in (0, 1):
            common = {"scale": 1.0, "weight_decay": 0.1, "scratch": k.update_scratch(np.float32)}
            common["when"] = put(np.int64(when)).reshape(())
            if isinstance(optimizer, SGD):
                velocity = state[0] if state else None
                k.sgd(weights, gradient, velocity, lr=0.1, momentum=0.9, nesterov=False, **common)
            else:
                k.adam(weights, gradient, *state, step=0.1, eps=1e-8, betas=(0.9, 0.99), shrink=0.9, **common)
            changed = [not np.array_equal(host(a), b) for a, b in zip((weights, *state), before)]
            assert changed == [bool(when)] * len(before)
