"""PyTorch's all-reduce beside ours, in a process of its own; see ``peer_process`` and ``peers/torch_all_reduce.py``."""

from __future__ import annotations

from ..world import World
from .peer_process import PeerProcess, find_python

_FLAG = "--torch-python"


def find_torch(world: World, python: str | None, asked_for: bool) -> str | None:
    """Return the interpreter that runs torch, or None; see :func:`peer_process.find_python`. **Collective.**"""
    return find_python(world, "torch", python, asked_for, _FLAG)


class TorchPeer(PeerProcess):
    """This rank's process of torch, started and met.

    **Collective.**

    Args:
        world: the ranks.
        python: the interpreter.

    Raises:
        CommunicationError: on all ranks, when the processes do not become a group.
    """

    def __init__(self, world: World, python: str) -> None:
        super().__init__(
            world,
            python,
            "torch_all_reduce.py",
            flag=_FLAG,
            leave_out="leave torch out of --transports",
        )
        self.start()
        self.meet()


class TorchWay:
    """A way to reduce, see ``reductions.Way``."""

    at_once, reduces = 1, True

    def __init__(self, peer: TorchPeer) -> None:
        self.name, self._peer = f"torch {peer.backend}", peer

    def fill(self, zeros: bool) -> None:
        self._peer.ask("fill", zeros=zeros)

    def run(self, number: int) -> tuple[float, float]:
        answer = self._peer.ask("run", number=number)
        return answer["start"], answer["end"]

    def is_right(self) -> bool:
        return bool(self._peer.ask("is_right")["right"])
