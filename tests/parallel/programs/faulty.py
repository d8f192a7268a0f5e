"""A job in which one rank does what the command line says: `faulty.py FAULT WHEN`.

WHEN is `before` (init), `inside` (it, after the meeting), `middle` (step 3 of 6), or `end` (after the last
step). FAULTY_RANK is the rank that does it (default 1; `all`: every rank), FAULTY_TIMEOUT the timeout given
to init, FAULTY_DELAY the seconds that the others wait before init.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from launching import RESULTS, fault, record

import mpdp
from mpdp import world as joining
from mpdp.errors import RankFailedError

FAULT, WHEN = sys.argv[1], sys.argv[2]
TIMEOUT = float(os.environ.get("FAULTY_TIMEOUT", "300"))
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
BAD = os.environ.get("FAULTY_RANK", "1")
IS_BAD = BAD == "all" or int(BAD) == RANK


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_in_thread():
    def work():
        raise ValueError("a bad sample")

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
    time.sleep(60)


def raise_here():
    raise ValueError("a bad sample")


def raise_on_all_ranks():
    error = RuntimeError("layouts differ")
    error.agreed = True
    raise error


def fail_and_clean_up():
    """What a trainer does: report at the raising point; the program's clean-up then tries a collective."""
    try:
        raise ValueError("a bad sample")
    except ValueError as error:
        WORLD.fail(error)
        try:
            WORLD.comm.all_reduce(np.zeros(1))
        except RankFailedError:
            print("no collective after a failure", file=sys.stderr, flush=True)
        raise


def fail_and_go_on():
    WORLD.fail(ValueError("a bad sample"))
    time.sleep(60)


def die_with_workers():
    """A forked worker holds copies of all sockets; the rank's death must show all the same."""
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_under_another_hook():
    sys.excepthook = lambda kind, error, trace: print("another hook:", error, flush=True)
    raise ValueError("a bad sample")


FAULTS = {
    "raise_on_all_ranks": raise_on_all_ranks,
    "fail_and_clean_up": fail_and_clean_up,
    "fail_and_go_on": fail_and_go_on,
    "die_with_workers": die_with_workers,
    "raise_under_another_hook": raise_under_another_hook,
    "raise": raise_here,
    "raise_in_thread": raise_in_thread,
    "exit_0": lambda: sys.exit(0),
    "exit_3": lambda: sys.exit(3),
    "os_exit_0": lambda: os._exit(0),
    "os_exit_3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "stall": lambda: time.sleep(60),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "nothing": lambda: None,
    "return": lambda: None,
}


def misbehave(when):
    if when == WHEN and IS_BAD:
        if FAULT != "nothing":
            fault()
        FAULTS[FAULT]()


def all_are_there():
    """In step 3: let nobody misbehave before the others have come to it."""
    folder = Path(os.environ[RESULTS])
    (folder / f"there.{WORLD.rank}").touch()
    if IS_BAD:
        deadline = time.monotonic() + 20
        while len(list(folder.glob("there.*"))) < WORLD.size and time.monotonic() < deadline:
            time.sleep(0.005)


def main():
    global WORLD
    misbehave("before")
    if not IS_BAD:
        time.sleep(float(os.environ.get("FAULTY_DELAY", "0")))
    import_mpi = joining._import_mpi

    def misbehave_first(launcher):
        misbehave("inside")
        return import_mpi(launcher)

    joining._import_mpi = misbehave_first
    world = WORLD = mpdp.init(timeout=TIMEOUT)
    for step in range(1, 7):
        world.activity.step = step
        if step == 3:
            all_are_there()
            if FAULT == "return" and IS_BAD:
                fault()
                return
            misbehave("middle")
        gradient = np.full(1000, world.rank + 1.0)
        world.comm.all_reduce(gradient)
        assert gradient[0] == world.size * (world.size + 1) / 2
    misbehave("end")
    record({"steps": world.activity.step, "size": world.size})


if __name__ == "__main__":
    if FAULT == "return" and WHEN == "before" and IS_BAD:
        pass
    else:
        main()
