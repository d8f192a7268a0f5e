"""A job in which one rank does what the command line says: `faulty.py FAULT WHEN`.

WHEN is `before` (init), `middle` (step 3 of 6), or `end` (after the last step).
"""

import os
import signal
import sys
import threading
import time

import numpy as np
import standing_in as mpdp

FAULT, WHEN = sys.argv[1], sys.argv[2]
TIMEOUT = float(os.environ.get("FAULTY_TIMEOUT", "300"))
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
BAD = int(os.environ.get("FAULTY_RANK", "1"))


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


FAULTS = {
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
}


def misbehave(when):
    if when == WHEN and RANK == BAD:
        FAULTS[FAULT]()


def main():
    misbehave("before")
    world = mpdp.init(timeout=TIMEOUT)
    for step in range(1, 7):
        world.activity.step = step
        if step == 3:
            if FAULT == "return" and world.rank == BAD:
                return
            misbehave("middle")
        gradient = np.full(1000, world.rank + 1.0)
        world.comm.all_reduce(gradient)
        assert gradient[0] == world.size * (world.size + 1) / 2
    misbehave("end")
    print("rank", world.rank, "finished", flush=True)


if __name__ == "__main__":
    if FAULT == "return" and WHEN == "before" and RANK == BAD:
        pass
    else:
        main()
