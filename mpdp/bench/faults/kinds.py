"""The faults: what is broken, in which programs, and what the job's end has to say.

A table. Whether a job did end so is :mod:`.trial`'s to judge.
"""

from __future__ import annotations

from dataclasses import dataclass

RANK = r"\[{rank}/{n}\] error "
ANY = r"\[\d+/{n}\] error "
HERE = r"in step \d+: "
DIED = ANY + r"(in step \d+: rank {rank} died: its process ended without a word|before init: .*rank {rank} )"
LEFT = ANY + r"in step \d+: rank {rank} left while rank \d+ is in step \d+ \("
WAITS = ANY + r"in step \d+: stalled: rank \d+, step \d+, .*waits for more than"
GONE = ANY + r"in step \d+: the launcher \(.*\) is gone"


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: what ``training`` knows it by.
        group: the row of the table that it counts in.
        report: pattern that the output holds; ``{rank}`` and ``{n}`` are filled in. None where nobody can report.
        loops: the programs it happens in.
        moments: ``"start"`` (before ``init`` or in it), ``"step"``, or ``"end"`` (the work is done).
        best_effort: the launcher may see it first and end the survivors before they report.
        stalls: it shows when the timeout is over.
        earliest, latest: updates in which it may happen.
        device: ``"cuda"`` for what only a GPU has.
        changes_data: the program feeds other batches than the undisturbed one, so other bits are right.
    """

    name: str
    group: str
    report: str | None
    loops: tuple[str, ...] = ("fit",)
    moments: tuple[str, ...] = ("step",)
    best_effort: bool = False
    stalls: bool = False
    earliest: int = 1
    latest: int = 24
    device: str = "cpu"
    changes_data: bool = False


_BOTH = ("fit", "own")
_RAISES = RANK + HERE
_AGREED = r"\[0/{n}\] error in step \d+: "


def _read(error: str) -> str:
    """Return the pattern of an error in the data, which all ranks agree on where they read the first batch together."""
    return rf"({_RAISES}{error}|{_AGREED}{error}.* \(on rank {{rank}} of {{n}}\))"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("dataset", "raise", _read("ValueError: a bad sample")),
        Kind("transform", "raise", _read("ValueError: a bad transform"), latest=16),
        Kind("model", "raise", _RAISES + "ValueError: a bad model", _BOTH),
        Kind("loss", "raise", _RAISES + "ValueError: a bad loss", _BOTH),
        Kind("callback", "raise", _RAISES + "ValueError: a bad callback", _BOTH),
        Kind("validation", "raise", _RAISES + "ValueError: a bad validation", latest=20),
        Kind("thread", "raise", _RAISES + r"ValueError: a bad thread \(in thread 'mine'\)", _BOTH),
        Kind("constructor", "raise", _RAISES + "ValueError: a bad width", moments=("start",)),
        Kind("before_init", "raise", RANK + "before init: ValueError: a bad setting", moments=("start",)),
        Kind("worker", "raise", _read("ValueError: a bad sample")),
        Kind("worker_killed", "raise", _read("WorkerError: Workers: expected an answer of worker")),
        Kind("memory", "raise", _RAISES + "MemoryError", _BOTH),
        Kind("device_memory", "raise", _RAISES + ".*OutOfMemory", _BOTH, device="cuda"),
        Kind("device_fault", "crash", _RAISES + ".*llegal", _BOTH, device="cuda"),
        Kind("exit_0", "exit", rf"({LEFT}|{_RAISES}SystemExit: 0)", _BOTH),
        Kind("exit_3", "exit", rf"({LEFT}|{_RAISES}SystemExit: 3)", _BOTH),
        Kind("return", "exit", LEFT, ("own",)),
        Kind("os_exit_0", "os._exit", DIED, _BOTH, ("start", "step"), best_effort=True),
        Kind("os_exit_3", "os._exit", DIED, _BOTH, ("start", "step"), best_effort=True),
        Kind("kill", "kill", DIED, _BOTH, ("start", "step", "step"), best_effort=True),
        Kind("crash", "crash", DIED, _BOTH, ("start", "step"), best_effort=True),
        Kind("abort", "crash", DIED, _BOTH, ("start", "step"), best_effort=True),
        Kind("crash_before_exit", "crash", DIED, _BOTH, ("end",), best_effort=True),
        Kind("crash_at_exit", "crash", None, _BOTH, ("end",)),
        Kind("spin", "stall", WAITS, _BOTH, stalls=True),
        Kind("read", "stall", WAITS, stalls=True),
        Kind("stopped", "stall", WAITS, _BOTH, stalls=True),
        Kind("stuck_in_c", "stall", WAITS, _BOTH, stalls=True),
        Kind("launcher_killed", "launcher", GONE, _BOTH, ("start", "step"), best_effort=True),
        Kind("nan", "numbers", _AGREED + r"NonFiniteError: loss: .*\(from rank {rank}\)"),
        Kind(
            "flipped_bit",
            "numbers",
            _AGREED + r"DivergenceError: replicas: .*on rank ({rank}|1 than on rank 0)",
            _BOTH,
        ),
        Kind(
            "skipped_batch",
            "disagreement",
            _AGREED + r"DisagreementError: save\(\): .*rank {rank}",
            ("own",),
            changes_data=True,
        ),
        Kind(  # from the callback of an update, so not in the first
            "extra_collective",
            "disagreement",
            _AGREED + "DisagreementError: .*a collective inside a",
            _BOTH,
            earliest=2,
        ),
        Kind("save_alone", "disagreement", _AGREED + r"DisagreementError: save\(\): ", _BOTH),
    )
}
