"""``mpdp run``: start a script as several processes, or as several threads of one.

Owns the arguments of the command. What the line holds is :mod:`.command`'s, which MPI it is for
:mod:`.mpi_library`'s, and what happens while it runs :mod:`.supervise`'s part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..cores import VARIABLES, cores, per_rank
from ..errors import LaunchError
from ..guard import RESTART
from .command import Command, Host, build, count_gpus, parse_hosts

_ABOUT = """\
Start a Python script as several processes, by the mpirun of the MPI that mpi4py loads.
The line is printed on stderr, and `mpirun -n N python script.py` does the same without this command.
The exit status is 0 only if every rank has finished, and 75 if a signal (SIGTERM, SIGUSR1) has ended the training
in order. With --max-restarts a job that failed is started again; the script calls trainer.resume().
With --threads the ranks are threads of one process, and no MPI is needed.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpdp run",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        type=_number,
        metavar="N",
        help="processes; default: the GPUs of this host, 2 where there is none",
    )
    parser.add_argument(
        "--hosts", type=_hosts, metavar="A,B:2", help="hosts to use, each with its number of processes"
    )
    parser.add_argument(
        "--threads", action="store_true", help="start threads of one process instead of processes"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the line on stdout and start nothing")
    parser.add_argument(
        "--exec",
        action="store_true",
        help="become mpirun instead of staying its parent: nobody checks the marks",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="K",
        help="start the job again when it fails, K times at the most (default: 0)",
    )
    parser.add_argument(
        "--min-ranks",
        type=_number,
        metavar="M",
        help="of --max-restarts: go on with M ranks where there is no place for all (default: all)",
    )
    parser.add_argument("script", type=_script, metavar="script.py", help="the script that each process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"n: expected a number of processes of at least 1, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"max-restarts: expected a number of 0 or more, got {text!r}")
    return int(text)


def _hosts(text: str) -> tuple[Host, ...]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _script(text: str) -> str:
    if re.fullmatch(r"python[0-9.]*", os.path.basename(text)):
        raise argparse.ArgumentTypeError(
            f"script: expected a script, got {text!r}; leave it out, ranks run the Python of mpdp"
        )
    if not os.path.isfile(text):  # False also where a name is too long
        raise argparse.ArgumentTypeError(f"script: expected a file that exists, got {text!r}; check the path")
    return text


def main(arguments: Sequence[str]) -> int:
    """Run the command. **Local.**

    Returns:
        The exit status: 2 for a usage error, 1 where no MPI fits, else the job's.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    slots = [host.slots for host in options.hosts or ()]
    if slots and None not in slots and _ranks(options) > sum(slots):
        parser.error(
            f"n: expected at most the {sum(slots)} processes of --hosts, got {options.n}; name more hosts"
        )
    if options.threads and options.hosts:
        parser.error("--threads: expected ranks on this host, got --hosts; leave one of them out")
    if options.max_restarts and options.exec:
        parser.error("--max-restarts: expected a parent that stays, got --exec; leave one of them out")
    if options.min_ranks is not None and not options.max_restarts:
        parser.error(
            "--min-ranks: expected --max-restarts beside it, got none; say how many restarts there may be"
        )
    if options.min_ranks is not None and options.min_ranks > _ranks(options):
        parser.error(
            f"--min-ranks: expected at most the {_ranks(options)} ranks of the job, got {options.min_ranks}"
        )
    try:
        command = _threads(options) if options.threads else _command(options)
    except LaunchError as error:
        print(f"mpdp run: error: {error}", file=sys.stderr)
        return 1
    if options.dry_run:
        print(command)
        return 0
    hold_streams()
    with contextlib.suppress(OSError):  # a full disk behind stderr
        print(f"mpdp run: {command}", file=sys.stderr, flush=True)
    if options.max_restarts:
        return _with_restarts(options)
    if options.exec or options.threads:
        os.execve(command.words[0], command.words, {**os.environ, **command.settings})
    from .supervise import supervise

    return supervise(command, _ranks(options))


def _with_restarts(options: argparse.Namespace) -> int:
    """Run the job, and again when it has failed. **Local.**"""
    from . import restarts
    from .supervise import Ended, watch

    n = _ranks(options)
    policy = restarts.Policy(options.max_restarts, n, n if options.min_ranks is None else options.min_ranks)
    hosts: tuple[Host, ...] = options.hosts or ()
    gpus = count_gpus(os.environ)

    def start(ranks: int, restart: int) -> Ended:
        os.environ[RESTART] = str(restart)  # what an MPI carries to other hosts is looked up here
        options.n = ranks
        command = _threads(options) if options.threads else _command(options)
        return watch(replace(command, settings={**command.settings, RESTART: str(restart)}), ranks)

    def available(ranks: int) -> int:
        if options.min_ranks is None:
            return ranks
        if hosts:
            share = -(-n // len(hosts))
            options.hosts = tuple(host for host in hosts if _answers(host))
            return min(ranks, sum(host.slots or share for host in options.hosts))
        return min(ranks, count_gpus(os.environ)) if n <= gpus else ranks

    return restarts.run(policy, start, available, restarts.say)


def _answers(host: Host) -> bool:
    """Return whether the launcher can start a process on a host now."""
    options = argparse.Namespace(n=1, hosts=(Host(host.name, 1),), script="-c", arguments=["pass"])
    command = _command(options)
    try:
        return subprocess.run(
            command.words,
            env={**os.environ, **command.settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
        ).returncode == 0  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False


def hold_streams() -> None:
    """Open what was closed of stdin, stdout and stderr on nothing: MPICH's mpirun fails without. **Local.**"""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for number in range(3):
        os.set_inheritable(number, True)


def _ranks(options: argparse.Namespace) -> int:
    if options.n is not None:
        return options.n
    if options.hosts:
        return sum(host.slots or 1 for host in options.hosts)
    return count_gpus(os.environ) or 2


def _threads(options: argparse.Namespace) -> Command:
    """Return the line of a process that runs the script in threads."""
    n = _ranks(options)
    settings: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        settings = {name: str(per_rank(n)) for name in VARIABLES if name not in os.environ}
    words = (sys.executable, "-m", "mpdp.cli.run_threads", str(n), options.script, *options.arguments)
    return Command(words, settings)


def _command(options: argparse.Namespace) -> Command:
    from .mpi_library import find_launcher, probe

    library = probe()
    return build(
        library,
        find_launcher(library),
        [sys.executable, options.script, *options.arguments],
        _ranks(options),
        hosts=options.hosts or (),
        cores=cores(),
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        environ=os.environ,
        remote_shell=bool(shutil.which("ssh") or shutil.which("rsh")),
    )
