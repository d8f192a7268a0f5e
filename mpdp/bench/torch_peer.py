"""PyTorch's all-reduce beside ours: a process a rank of an interpreter that has torch, told what to do by a pipe.

The processes are a process group of their own (gloo, or NCCL on GPUs). They sleep while others take their turn, and
this process sleeps while they work. Clocks are compared: ``time.perf_counter()`` is one clock for all processes of a
node. Read ``peers/torch_all_reduce.py`` for the other end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..comm.agreement import together
from ..errors import CommunicationError, MissingDependencyError, on_all_ranks
from ..world import World

SCRIPT = Path(__file__).parent / "peers" / "torch_all_reduce.py"
_PATIENCE = 10.0  # seconds for a process to end


def find_torch(world: World, python: str | None, asked_for: bool) -> str | None:
    """Return the interpreter that runs torch: the one named, else this one if it has torch on every rank.

    **Collective.**

    Args:
        world: the ranks.
        python: path of an interpreter.
        asked_for: it is an error that there is none.

    Raises:
        MissingDependencyError: on all ranks: none was named and this one has no torch.
    """
    if python is not None:
        return python
    mine = importlib.util.find_spec("torch") is not None
    if all(text == b"1" for text in world.comm.all_gather_bytes(b"1" if mine else b"0")):
        return sys.executable
    if not asked_for:
        return None
    raise on_all_ranks(
        MissingDependencyError(
            "torch: expected PyTorch on every rank, found none; install it with: pip install torch, or name a Python "
            "that has it: --torch-python PATH"
        )
    )


class TorchPeer:
    """This rank's process of torch.

    **Collective.**

    Args:
        world: the ranks.
        python: the interpreter.

    Raises:
        CommunicationError: on all ranks, when the processes do not become a group.
    """

    def __init__(self, world: World, python: str) -> None:
        self.backend = "nccl" if world.device.kind == "cuda" else "gloo"
        self._world, self._python = world, python
        self._process: subprocess.Popen[str] | None = None
        try:
            self.version = self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> str:
        """Start all processes and return their version of torch. **Collective.**"""
        world = self._world
        host = "127.0.0.1" if world.num_nodes == 1 else socket.gethostname()
        first = together(world.comm, lambda: self._start(host, 0) if world.rank == 0 else {})
        text = world.comm.broadcast_bytes(json.dumps([host, first.get("port")]).encode())
        host, port = json.loads(text)
        together(world.comm, lambda: self._start(host, port) if world.rank else {})
        return str(together(world.comm, self._answer)["version"])

    def _start(self, host: str, port: int) -> dict[str, Any]:
        """Start the process; return the first answer of rank 0's."""
        world = self._world
        words = ["--rank", world.rank, "--size", world.size, "--backend", self.backend]
        words += ["--device", world.device, "--host", host, "--port", port]
        environ = dict(os.environ)
        if world.num_nodes == 1:
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
        try:
            self._process = subprocess.Popen(
                [self._python, str(SCRIPT), *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
            )
        except OSError as error:
            raise CommunicationError(
                f"torch: expected a Python at {self._python}, got {error}; give its path: --torch-python PATH"
            ) from error
        return {} if world.rank else self._answer()

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Let the process do something, and return its answer. **Collective**, where the call is.

        Raises:
            CommunicationError: it cannot.
        """
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will be missing
            process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        line = process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the end of its process"}
        if "error" in answer:
            raise CommunicationError(
                f"torch: expected an answer of {self.backend} from {self._python}, got {answer['error']}; see what it "
                "printed, or leave torch out of --transports"
            )
        return answer

    def close(self) -> None:
        """End the process. **Local.**"""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


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
