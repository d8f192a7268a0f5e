"""Benchmarks: what speed and memory are measured with; ``mpdp bench NAME``, alone or under mpirun."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..device import as_device

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit status. **Collective** under mpirun."""
    parser = argparse.ArgumentParser(prog="mpdp bench", description="Measure mpdp on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="{train}")
    train = commands.add_parser("train", help="the training step of a workload, without the loader")
    train.add_argument("workload", choices=["mlp", "chargpt"])
    train.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:ORDINAL")
    train.add_argument("--batch", type=int, default=None, help="samples a rank (default: the workload's)")
    train.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    train.add_argument("--json", metavar="PATH", default=None, help="write one JSON object; - is stdout")
    arguments = parser.parse_args(argv)
    if arguments.batch is not None and arguments.batch < 1:
        parser.error(f"--batch: expected 1 or more, got {arguments.batch}")
    if arguments.device != "auto":
        try:
            as_device(arguments.device)
        except ValueError as error:
            parser.error(str(error))
    from . import train as train_bench

    return train_bench.run(
        arguments.workload,
        device=arguments.device,
        batch=arguments.batch,
        quick=arguments.quick,
        json_path=arguments.json,
    )
