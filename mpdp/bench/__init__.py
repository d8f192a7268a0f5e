"""Benchmarks: what speed and memory are measured with; ``mpdp bench NAME``, alone or under mpirun."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..cli import outputs
from ..comm.base import FLOATS, INTEGERS
from ..device import as_device

__all__ = ["main"]

CASES = (
    "shared_memory",
    "two_level",
    "mpi",
    "mpi4py",
    "torch",
)  # of all-reduce; mpi4py is one plain call of MPI
WORKLOADS = ("mlp", "convnet", "chargpt", "gpt2", "resnet50")
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
PEERS = ("torch", "torch-compile", "torch-graph", "torch-compile-graph", "jax")
GPU_CASES = ("cuda_ipc", "nccl", "staged", "mpi4py", "torch")


def cases_of(kind: str) -> tuple[str, ...]:
    """Return what ``mpdp bench all-reduce`` knows on a kind of device. **Local.**"""
    return CASES if kind == "cpu" else GPU_CASES


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit status. **Collective** under mpirun."""
    parser = argparse.ArgumentParser(prog="mpdp bench", description="Measure mpdp on this machine.")
    commands = parser.add_subparsers(
        dest="benchmark",
        required=True,
        metavar="{train,placements,all-reduce,contention,memory,checkpoint,faults}",
    )
    _add_train(commands)
    _add_placements(commands)
    _add_all_reduce(commands)
    _add_memory(commands)
    _add_checkpoint(commands)
    _add_contention(commands)
    _add_faults(commands)
    arguments = parser.parse_args(argv)
    if arguments.benchmark in ("memory", "checkpoint"):
        return _of_the_host(arguments)
    if arguments.benchmark == "faults":
        return _faults(parser, arguments)
    kind = "auto"
    if arguments.device != "auto":
        try:
            kind = as_device(arguments.device).kind
        except ValueError as error:
            parser.error(str(error))
    if arguments.benchmark == "placements":
        if arguments.batch is not None and arguments.batch < 1:
            parser.error(f"--batch: expected 1 or more, got {arguments.batch}")
        return _placements(arguments)
    if arguments.benchmark == "contention":
        return _contention(arguments)
    if arguments.benchmark == "all-reduce" and arguments.tune:
        from . import tune

        tunable = tune.TRANSPORTS[kind] if kind != "auto" else sum(tune.TRANSPORTS.values(), ())
        if arguments.sizes or arguments.plot or set(arguments.transports or ()) - {*tunable}:
            parser.error(f"--tune: expected no other choice than --transports {','.join(tunable)}")
        return tune.run(
            device=arguments.device,
            transports=arguments.transports,
            quick=arguments.quick,
            json_path=arguments.json,
        )
    if arguments.benchmark == "all-reduce":
        known = cases_of(kind) if kind != "auto" else (*CASES, *GPU_CASES)
        for name in arguments.transports or ():
            if name not in known:
                parser.error(f"--transports: expected some of {','.join(known)} on {kind}, got {name!r}")
        return _all_reduce(arguments)
    _check_train(parser, arguments, kind)
    return _train(arguments)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="the training step of a workload, without the loader")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:ORDINAL")
    parser.add_argument("--batch", type=int, default=None, help="samples a rank (default: the workload's)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=None,
        help="default: bfloat16 on a GPU but for mlp, else float32",
    )
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="capture our step as one graph, or do not (default: the trainer's choice)",
    )
    parser.add_argument(
        "--plans",
        choices=["suggested", "timed"],
        default="suggested",
        help="of the libraries behind our products on a GPU: what they suggest, or what proves fastest",
    )
    parser.add_argument(
        "--peers", type=_some(PEERS), default=(), help=f"compare with some of {','.join(PEERS)}, in turns"
    )
    parser.add_argument(
        "--peer-python", metavar="PATH", default=None, help="a Python that has the peers, if this one has not"
    )
    parser.add_argument(
        "--clip",
        choices=["mine", "both", "none"],
        default="mine",
        help="whose step clips gradients to norm 1 (default: ours alone)",
    )
    parser.add_argument(
        "--global-stats", action="store_true", help="batch norms take the statistics of all ranks"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--blocks", type=int, default=None, help="blocks of each side (default: 5)")
    parser.add_argument("--seconds", type=float, default=None, help="length of a block (default: 2)")
    parser.add_argument(
        "--json", type=outputs.path, metavar="PATH", default=None, help="write one JSON object; - is stdout"
    )
    parser.add_argument(
        "--plot",
        type=outputs.path,
        metavar="PATH.png",
        default=None,
        help="draw the steps by what their time goes to",
    )
    parser.add_argument(
        "--trace",
        type=outputs.path,
        metavar="PATH",
        default=None,
        help="write the last steps of all ranks for ui.perfetto.dev",
    )
    parser.add_argument(
        "--losses",
        type=int,
        nargs="?",
        const=0,
        default=None,
        metavar="N",
        help="compare the losses of N updates from the same weights instead (default: 10 or 50)",
    )
    parser.add_argument(
        "--weights", metavar="F.npz", default=None, help="of --losses: what torch writes, or has written"
    )


def _check_train(parser: argparse.ArgumentParser, arguments: argparse.Namespace, kind: str) -> None:
    """End with a usage error where options do not fit."""
    for name in ("batch", "blocks"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected 1 or more, got {value}")
    if arguments.seconds is not None and not 0 < arguments.seconds < 3600:
        parser.error(f"--seconds: expected more than 0 and less than 3600, got {arguments.seconds}")
    if arguments.losses is not None and arguments.losses < 0:
        parser.error(f"--losses: expected 1 or more, got {arguments.losses}")
    if (arguments.losses is None) != (arguments.weights is None):
        parser.error("--losses, --weights: expected both or none, got one")
    if kind == "cpu" and any("graph" in name for name in arguments.peers):
        parser.error("--peers: expected no graphs on the CPU, got some; a CUDA graph needs --device cuda")
    if "jax" in arguments.peers and (arguments.workload != "mlp" or arguments.precision == "float16"):
        parser.error(
            "--peers: expected jax for mlp only, and not in float16, got another workload or precision"
        )


def _train(arguments: argparse.Namespace) -> int:
    from . import train

    blocks = train.QUICK_BLOCKS if arguments.quick else train.BLOCKS
    seconds = train.QUICK_SECONDS if arguments.quick else train.BLOCK_SECONDS
    plan = train.Plan(
        arguments.peers, arguments.peer_python, arguments.blocks or blocks, arguments.seconds or seconds
    )
    return train.run(
        arguments.workload,
        device=arguments.device,
        plan=plan,
        precision=arguments.precision,
        json_path=arguments.json,
        trace_path=arguments.trace,
        plot_path=arguments.plot,
        losses_count=arguments.losses,
        weights_path=arguments.weights,
        batch=arguments.batch,
        graph="auto" if arguments.graph is None else arguments.graph,
        clip_norm=None if arguments.clip == "none" else 1.0,
        peers_clip=arguments.clip == "both",
        global_stats=arguments.global_stats,
        plans=arguments.plans,
    )


def _add_placements(commands: Any) -> None:
    parser = commands.add_parser("placements", help="memory, bytes sent and step time of each placement")
    parser.add_argument("workload", choices=WORKLOADS, nargs="?", default="chargpt", help="default: chargpt")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:ORDINAL")
    parser.add_argument("--batch", type=int, default=None, help="samples a rank (default: the workload's)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=None,
        help="default: bfloat16 on a GPU but for mlp, else float32",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--json", metavar="PATH", default=None, help="write one JSON object; - is stdout")


def _placements(arguments: argparse.Namespace) -> int:
    from . import placements

    return placements.run(
        arguments.workload,
        device=arguments.device,
        precision=arguments.precision,
        batch=arguments.batch,
        quick=arguments.quick,
        json_path=arguments.json,
    )


def _add_memory(commands: Any) -> None:
    parser = commands.add_parser("memory", help="what mapped data and steps take of a host's memory")
    parser.add_argument(
        "--bytes", type=_sizes, default=None, help="of the mapped array, as in 256M (default: 1G)"
    )
    parser.add_argument("--folder", default=None, help="where it is written (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="an array of 64M")
    parser.add_argument(
        "--json", type=outputs.path, metavar="PATH", default=None, help="write one JSON object; - is stdout"
    )


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint", help="how long a save holds training up, and what it leaves behind"
    )
    parser.add_argument(
        "--bytes", type=_sizes, default=None, help="size of the checkpoint, as in 1G (default)"
    )
    parser.add_argument("--folder", default=None, help="where it is written (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="64 MiB and fewer rounds")
    parser.add_argument("--json", metavar="PATH", default=None, help="write one JSON object; - is stdout")


def _of_the_host(arguments: argparse.Namespace) -> int:
    from . import checkpoint, memory

    nbytes = None if arguments.bytes is None else arguments.bytes[0]
    run = memory.run if arguments.benchmark == "memory" else checkpoint.run
    return run(quick=arguments.quick, nbytes=nbytes, folder=arguments.folder, json_path=arguments.json)


def _add_all_reduce(commands: Any) -> None:
    parser = commands.add_parser("all-reduce", help="the all-reduce of each transport, size by size")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:ORDINAL")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=None,
        help="bytes, as in 8,64K,1M (default: powers of 8, 64M and 256M)",
    )
    parser.add_argument(
        "--dtypes", type=_some(FLOATS + INTEGERS), default=("float32",), help="as in float32,float16"
    )
    parser.add_argument(
        "--transports",
        type=_some(tuple(dict.fromkeys(CASES + GPU_CASES))),
        default=None,
        help=f"some of {','.join(CASES)}, on GPUs of {','.join(GPU_CASES)} (default: what runs here)",
    )
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        default=None,
        help="a Python that has PyTorch, if this one has not: compare with its gloo, on GPUs its NCCL",
    )
    parser.add_argument(
        "--tune", action="store_true", help="measure the sizes that transports are cut by, and keep them"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument(
        "--json", type=outputs.path, metavar="PATH", default=None, help="write one JSON object; - is stdout"
    )
    parser.add_argument(
        "--plot",
        type=outputs.path,
        metavar="PATH.png",
        default=None,
        help="draw time and bandwidth against size",
    )


def _add_contention(commands: Any) -> None:
    parser = commands.add_parser("contention", help="whether threads hinder each other's launches")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: auto")
    parser.add_argument(
        "--gpus", type=_at_least_one, default=None, help="use so many of the GPUs (default: all)"
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer arms and repetitions: under 45 s")
    extent.add_argument("--full", action="store_true", help="all arms, however long it takes")
    parser.add_argument(
        "--json",
        type=outputs.path,
        metavar="PATH",
        default=None,
        help="write one JSON object, and PATH.samples.jsonl; - is stdout",
    )
    parser.add_argument(
        "--plot", type=outputs.path, metavar="PATH.png", default=None, help="draw rates, latencies and steps"
    )
    parser.add_argument(
        "--torch-python", metavar="PATH", default=None, help="a Python that has PyTorch, if this one has not"
    )


def _contention(arguments: argparse.Namespace) -> int:
    from .contention import command

    return command.run(
        device=arguments.device,
        extent="quick" if arguments.quick else "full" if arguments.full else "default",
        gpus=arguments.gpus,
        json_path=arguments.json,
        plot_path=arguments.plot,
        torch_python=arguments.torch_python,
    )


def _add_faults(commands: Any) -> None:
    parser = commands.add_parser("faults", help="break short trainings in every known way, see how they end")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--quick", action="store_true", help="a dozen faults")
    parser.add_argument(
        "--cost", action="store_true", help="measure instead what checks cost a step of mlp; under a launcher"
    )
    parser.add_argument("--trials", type=_at_least_one, default=None, help="faults (default: 320)")
    parser.add_argument("--seconds", type=float, default=None, help="after which no fault is begun")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None, help="as in kill,stopped")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="one more Python, with another MPI"
    )
    parser.add_argument(
        "--json",
        metavar="PATH",
        default=None,
        help="write one JSON object, and PATH.rows.jsonl, from which it goes on; - is stdout",
    )


def _faults(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.cost:
        from .faults import cost

        return cost.run(quick=arguments.quick, json_path=arguments.json)
    from .. import guard
    from .faults import command
    from .faults.kinds import KINDS

    announcement = guard.current.announcement
    if announcement is not None and announcement.size > 1:
        parser.error(
            f"faults: expected no launcher, got one of {announcement.size} ranks; it starts its jobs itself"
        )

    for name in arguments.kinds or ():
        if name not in KINDS:
            parser.error(f"--kinds: expected some of {','.join(KINDS)}, got {name!r}")
    return command.run(
        device=arguments.device,
        quick=arguments.quick,
        trials=arguments.trials,
        seconds=arguments.seconds,
        seed=arguments.seed,
        kinds=arguments.kinds,
        pythons=arguments.python,
        json_path=arguments.json,
    )


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _all_reduce(arguments: argparse.Namespace) -> int:
    from . import all_reduce

    return all_reduce.run(
        device=arguments.device,
        sizes=arguments.sizes,
        dtypes=arguments.dtypes,
        transports=arguments.transports,
        quick=arguments.quick,
        json_path=arguments.json,
        plot_path=arguments.plot,
        torch_python=arguments.torch_python,
    )


def _some(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def words(text: str) -> tuple[str, ...]:
        found = tuple(word.strip() for word in text.split(","))
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {word!r}")
        return found

    return words


def _sizes(text: str) -> tuple[int, ...]:
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([KMG]?)(i?B)?", word.strip(), re.IGNORECASE)
        if match is None:
            raise argparse.ArgumentTypeError(f"expected sizes such as 8,64K,1M, got {word!r}")
        sizes.append(int(match[1]) * units[match[2].upper()])
    return tuple(sizes)
