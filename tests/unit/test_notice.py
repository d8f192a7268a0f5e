"""Signals as a request to end, in processes of their own: handlers, repeats, late ones, forks, patience."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from mpdp.notice import SIGNALS, Notice


def run(text):
    """Run a program that sends itself signals; return its status and output."""
    prelude = """
    import os, signal, sys, threading, time
    from mpdp.notice import Notice
    def send(number=signal.SIGTERM):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
    """
    words = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(text)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_signal_is_noted_and_the_first_one_counts():
    text = """
    told = []
    notice = Notice(told.append)
    assert not notice.asked
    listener = notice.listen(60)
    send(signal.SIGUSR1); send(); send()
    assert notice.asked and notice.number == signal.SIGUSR1 and told == [True]
    notice.obeyed()
    send()
    notice.silence(listener)
    send(); send(signal.SIGUSR1)  # it is about to end
    print(told)
    """
    assert run(text) == (0, "[True, False]\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_nobody_listens_before_and_after(number):
    assert run(f"notice = Notice(); send({int(number)})")[0] == -number
    assert run(f"notice = Notice(); notice.silence(notice.listen(60)); send({int(number)})")[0] == -number


def test_a_signal_that_nobody_obeyed_comes_again():
    code, out = run(
        "n = Notice(); k = n.listen(60); send(); print(n.asked, flush=True); n.silence(k); print('after')"
    )
    assert (code, out) == (-signal.SIGTERM, "True\n")


def test_listeners_are_counted():
    assert run("n = Notice(); n.listen(9); n.silence(n.listen(9)); send(); print(n.asked)") == (0, "True\n")


def test_it_listens_again_after_it_was_obeyed():
    text = """
    n = Notice(); k = n.listen(9); send(); n.obeyed(); n.silence(k)
    n.listen(9); print(n.asked); send(); print(n.asked)
    """
    assert run(text) == (0, "False\nTrue\n")


def test_a_handler_of_the_program_stays():
    text = """
    signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    n = Notice(); k = n.listen(60); send(); send(signal.SIGUSR1); print(n.asked); n.silence(k); send()
    """
    assert run(text) == (0, "mine\nFalse\nmine\n")


def test_a_forked_child_dies_of_it():
    text = """
    n = Notice(); n.listen(60)
    there, child_is_there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_is_there, b"!")
        time.sleep(30)
    os.read(there, 1)
    os.kill(child, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), n.asked)
    """
    assert run(text) == (0, "15 False\n")


def test_a_process_that_does_not_obey_is_ended():
    text = """
    n = Notice(expired=lambda number: os._exit(100 + number))
    n.listen(0.2); send(); time.sleep(30)
    """
    assert run(text)[0] == 115


def test_a_handler_in_c_is_replaced_by_nothing():
    """MPICH's SIGUSR1, with which its mpirun tells of a failed rank: Python could only put the deadly default back."""
    text = """
    import faulthandler
    faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"))
    n = Notice(); n.silence(n.listen(60)); send(signal.SIGUSR1); print("alive")
    """
    assert run(text) == (0, "alive\n")


def test_outside_of_the_main_thread_it_waits_for_sync():
    notice, before = Notice(), signal.getsignal(signal.SIGTERM)
    listeners = []
    thread = threading.Thread(target=lambda: listeners.append(notice.listen(60)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    try:
        notice.sync()
        assert signal.getsignal(signal.SIGTERM) == notice._heard
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.asked
        notice.number = None  # nothing is to come again
    finally:
        notice.silence(*listeners)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_collector_may_silence_in_a_thread_that_is_being_started():
    """Where a trainer that is gone is collected just there, the one who listens must not wait for it for ever."""
    text = """
    class Thread(threading.Thread):
        def start(self):
            collector = threading.Thread(target=notice.silence, args=[gone], daemon=True)
            collector.start()
            collector.join(20)
            print("waits" if collector.is_alive() else "done", flush=True)
            super().start()
    notice = Notice()
    gone = notice.listen(60)
    notice.silence(gone)
    import types, mpdp.notice as module
    module.threading = types.SimpleNamespace(**{**vars(threading), "Thread": Thread})
    listener = notice.listen(60)
    send(); print(notice.asked, flush=True)
    notice.obeyed(); notice.silence(listener)
    """
    assert run(text) == (0, "done\nTrue\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_last_was_silenced_in_another_thread(number):
    text = f"""
    n = Notice(); k = n.listen(60)
    t = threading.Thread(target=n.silence, args=[k]); t.start(); t.join()
    send({int(number)}); print("after")
    """
    assert run(text) == (-number, "")


def test_a_signal_that_was_heard_comes_again_behind_the_last_in_another_thread():
    text = """
    n = Notice(); k = n.listen(60)
    send(); print(n.asked, flush=True)
    t = threading.Thread(target=n.silence, args=[k]); t.start(); t.join()
    send(); print("after")
    """
    assert run(text) == (-signal.SIGTERM, "True\n")


def test_a_signal_while_handlers_are_put_in_for_nobody():
    text = """
    def changed(taken):
        if taken:
            t = threading.Thread(target=n.silence, args=[0]); t.start(); t.join()
            send()
    n = Notice(changed); n.listen(60); print("after")
    """
    assert run(text) == (-signal.SIGTERM, "")


def test_an_error_while_handlers_are_put_in_leaves_none():
    text = """
    pipe, start = os.pipe, threading.Thread.start
    def fails(*_):
        raise OSError("none left")
    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt
    def changed(taken):
        if taken and told:
            raise told.pop()
    told = []
    n = Notice(changed)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "start", "changed"):
        if name == "pipe": os.pipe = fails
        if name == "start": threading.Thread.start = interrupted
        if name == "changed": told.append(KeyboardInterrupt())
        try:
            n.listen(60)
        except (OSError, KeyboardInterrupt):
            print(name, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
        os.pipe, threading.Thread.start = pipe, start
    time.sleep(0.2)  # the watches end
    print(len(os.listdir("/proc/self/fd")) - before)
    k = n.listen(60); send(); print(n.asked, flush=True); n.silence(k)
    """
    assert run(text) == (-signal.SIGTERM, "pipe True\nstart True\nchanged True\n0\nTrue\n")


def test_it_listens_anew_after_it_was_obeyed_while_another_still_listens():
    """As a trainer with a loop of its own does until it is gone."""
    text = """
    n = Notice(); n.listen(60); send(); n.obeyed(); send(); print(n.asked)
    n.listen(60); print(n.asked); send(); print(n.asked, flush=True)
    """
    assert run(text) == (0, "False\nFalse\nTrue\n")


def test_an_error_while_it_listens_anew_closes_nothing_twice():
    text = """
    def fails():
        raise OSError("none left")
    n = Notice(); k = n.listen(60); send(); n.obeyed()
    pipe, os.pipe = os.pipe, fails
    try:
        n.listen(60)
    except OSError as error:
        print(error, flush=True)
    os.pipe = pipe
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    n.silence(k)
    print([os.fstat(number) is None for number in others].count(False), flush=True)
    n.listen(60); send(); print(n.asked, flush=True)
    """
    assert run(text) == (0, "none left\n8\nTrue\n")


def test_a_program_that_has_taken_the_signal_meanwhile_gets_it_once():
    text = """
    def mine(number, frame):
        raise InterruptedError
    n = Notice(expired=lambda number: print("expired", flush=True)); k = n.listen(0.3)
    send(); signal.signal(signal.SIGTERM, mine)
    try:
        n.silence(k)
    except InterruptedError:
        print("mine")
    time.sleep(0.6)
    """
    assert run(text) == (0, "mine\n")


def test_a_child_forked_while_handlers_are_put_in_takes_its_own():
    text = """
    def changed(taken):
        if taken and os.getpid() == parent and not children:
            children.append(0)
            t = threading.Thread(target=fork); t.start(); t.join()
    def fork():
        child = os.fork()
        if child == 0:
            n.listen(60); send(); print(n.asked, flush=True); os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    parent, children = os.getpid(), []
    n = Notice(changed); k = n.listen(60); n.silence(k)
    """
    assert run(text) == (0, "True\n0\n")


def test_silence_inside_of_silence_puts_handlers_out_once():
    """The collector may run where the handlers are being put out; what is closed twice may be somebody else's."""
    text = """
    closed = []
    n = Notice(lambda taken: taken or n.silence(99))
    k = n.listen(60)
    close = os.close
    os.close = lambda number: (closed.append(number), close(number))
    n.silence(k)
    time.sleep(0.2)  # the watch closes its end
    print(len(closed), len(set(closed)), n.listen(60))
    """
    assert run(text) == (0, "2 2 1\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_at_the_end_of_the_process_nobody_listens_any_more(number):
    notice = Notice()
    notice.listen(60.0), notice.listen(60.0)
    os.kill(os.getpid(), number)
    notice.dismiss()  # what came too late is not sent again: the work is done
    assert signal.getsignal(number) == signal.SIG_DFL and notice.number is None
