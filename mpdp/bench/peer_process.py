"""Another system beside ours: a process a rank of an interpreter that has it, told what to do by a pipe.

The processes are a group of their own (gloo, or NCCL on GPUs). They sleep while others take their turn, and this
process sleeps while they work. Clocks are compared: ``time.perf_counter()`` is one clock for all processes of a node.
Read ``peers/conversation.py`` for the other end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..comm.agreement import together
from ..errors import CommunicationError, MissingDependencyError, on_all_ranks
from ..world import World, blas_threads

PEERS = Path(__file__).parent / "peers"
_PATIENCE = 10.0  # seconds for a process to end
_NAMES = {"torch": "PyTorch", "jax": "JAX"}


def find_python(world: World, module: str, python: str | None, asked_for: bool, flag: str) -> str | None:
    """Return the interpreter that runs a module: the one named, else this one if it has it on every rank.

    **Collective.**

    Args:
        world: the ranks.
        module: ``"torch"`` or ``"jax"``.
        python: path of an interpreter.
        asked_for: it is an error that there is none.
        flag: of the command line, which names an interpreter.

    Raises:
        MissingDependencyError: on all ranks: none was named and this one has no such module.
    """
    if python is not None:
        return python
    mine = importlib.util.find_spec(module) is not None
    if all(text == b"1" for text in world.comm.all_gather_bytes(b"1" if mine else b"0")):
        return sys.executable
    if not asked_for:
        return None
    raise on_all_ranks(
        MissingDependencyError(
            f"{module}: expected {_NAMES[module]} on every rank, found none; install it with: pip install {module}, "
            f"or name a Python that has it: {flag} PATH"
        )
    )


class PeerProcess:
    """This rank's process of another system. :meth:`start` several, then let each :meth:`meet`.

    Args:
        world: the ranks.
        python: the interpreter.
        script: a file of ``peers``.
        options: more words for it.
        module: what it imports, for messages.
        flag: of the command line, which names an interpreter.
        leave_out: what a user may do who can do without it.
    """

    def __init__(
        self,
        world: World,
        python: str,
        script: str,
        options: Sequence[Any] = (),
        *,
        module: str = "torch",
        flag: str,
        leave_out: str,
    ) -> None:
        self.backend = "nccl" if world.device.kind == "cuda" else "gloo"
        self.version = ""
        self._world, self._python, self._script, self._options = world, python, script, options
        self._module, self._flag, self._leave_out = module, flag, leave_out
        self._host = "127.0.0.1" if world.num_nodes == 1 else socket.gethostname()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the processes. **Collective.**

        Raises:
            CommunicationError: on all ranks: there is no such interpreter.
        """
        together(self._world.comm, self._start)

    def meet(self) -> None:
        """Wait until all processes have become a group. **Collective.**

        Raises:
            CommunicationError: on all ranks: they cannot.
        """
        world = self._world
        try:
            first = together(world.comm, self._answer)
            text = world.comm.broadcast_bytes(json.dumps([self._host, first.get("port")]).encode())
            host, port = json.loads(text)
            self.version = str(
                together(world.comm, lambda: self.ask("join", host=host, port=port))["version"]
            )
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        world = self._world
        words = ["--rank", world.rank, "--size", world.size, "--backend", self.backend]
        words += ["--device", world.device, "--host", self._host, *self._options]
        environ = dict(os.environ)
        environ.setdefault("OMP_NUM_THREADS", str(blas_threads()))  # as many threads as our products have
        if world.num_nodes == 1:
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
        try:
            self._process = subprocess.Popen(
                [self._python, str(PEERS / self._script), *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
            )
        except OSError as error:
            raise CommunicationError(
                f"{self._module}: expected a Python at {self._python}, got {error}; give its path: {self._flag} PATH"
            ) from error

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
                f"{self._module}: expected an answer of {self.backend} from {self._python}, got {answer['error']}; "
                f"see what it printed, or {self._leave_out}"
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
