"""PyTorch's all-reduce as one process a rank, which does what it reads, a JSON object a line, and answers likewise.

``mpdp bench all-reduce`` starts it. Rank 0 says first at which port the others find it; each says when it is ready.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", required=True, help="of rank 0")
    parser.add_argument("--port", type=int, default=0, help="of rank 0; 0 on rank 0, which then takes one")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()

    def answer(**words):
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    try:
        import torch
        import torch.distributed as dist

        first = arguments.rank == 0
        store = dist.TCPStore(arguments.host, arguments.port, is_master=first, wait_for_workers=False)
        if first:
            answer(port=store.port)
        if arguments.device != "cpu":
            torch.cuda.set_device(arguments.device)
        dist.init_process_group(
            arguments.backend, store=store, rank=arguments.rank, world_size=arguments.size
        )
        answer(version=torch.__version__)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return
    work = Work(torch, dist, arguments)
    while True:
        words = json.loads(lines.get())
        try:
            answer(**getattr(work, words.pop("call"))(**words))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


def read(lines):
    """Take what the parent says; end with it, wherever the main thread waits."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


class Work:
    """The tensor that is reduced."""

    def __init__(self, torch, dist, arguments):
        self.torch, self.dist, self.arguments = torch, dist, arguments

    def prepare(self, count, dtype):
        self.dtype = getattr(self.torch, dtype)
        self.tensor = self.torch.zeros(count, dtype=self.dtype, device=self.arguments.device)
        self.given = self.content(self.arguments.rank)
        self.dist.all_reduce(self.tensor)  # does it know the dtype?
        self.finish()
        return {}

    def content(self, rank):
        count = self.tensor.numel()
        return ((self.torch.arange(count, device=self.arguments.device) + rank) % 5).to(self.dtype)

    def fill(self, zeros):
        if zeros:
            self.tensor.zero_()
        else:
            self.tensor.copy_(self.given)
        self.finish()
        return {}

    def run(self, number):
        start = time.perf_counter()
        for _ in range(number):
            self.dist.all_reduce(self.tensor)
        self.finish()
        return {"start": start, "end": time.perf_counter()}

    def is_right(self):
        self.fill(zeros=False)
        self.dist.all_reduce(self.tensor)
        total = self.torch.zeros_like(self.tensor)
        for rank in range(self.arguments.size):
            total += self.content(rank)
        return {"right": bool(self.torch.equal(self.tensor, total))}

    def finish(self):
        if self.arguments.device != "cpu":
            self.torch.cuda.synchronize()


if __name__ == "__main__":
    main()
