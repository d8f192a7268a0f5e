"""Ranks as threads of the test's own process, for what needs several ranks and no launcher."""

import threading

from mpdp.comm.thread_memory import Meeting, ThreadCommunicator


def run(size, body, **arguments):
    """Return what ``body(comm)`` returns on each rank, each in a thread; raises what a rank raised."""
    meeting = Meeting(size)
    results, errors = [None] * size, [None] * size

    def work(rank):
        try:
            results[rank] = body(ThreadCommunicator(meeting, rank, **arguments))
        except BaseException as error:
            errors[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results
