"""``mpdp run``: start a script as several processes, or as several threads of one.

Owns the arguments of the command. What the line holds is :mod:`.command`'s, which MPI it is for
:mod:`.mpi_library`'s, and what happens while it runs :mod:`.supervise`'s part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cores import VARIABLES, cores, per_rank
from ..errors import LaunchError
from .command import Command, Host, build, count_gpus, parse_hosts

_ABOUT = """\
Start a Python script as several processes, by the mpirun of the MPI that mpi4py loads.
The line is printed on stderr, and `mpirun -n N python script.py` does the same without this command.
The exit status is 0 only if every rank has finished.
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
    parser.add_argument("script", type=_script, metavar="script.py", help="the script that each process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"n: expected a number of processes of at least 1, got {text!r}")
    return int(text)


def _hosts(text: str) -> tuple[Host, ...]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _script(text: str) -> str:
    if not Path(text).is_file():
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
    if options.exec or options.threads:
        os.execve(command.words[0], command.words, {**os.environ, **command.settings})
    from .supervise import supervise

    return supervise(command, _ranks(options))


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
