"""PyTorch's all-reduce as one process a rank, told what to do by ``mpdp bench all-reduce``; see ``conversation``."""

import argparse
import time

from conversation import Conversation


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", required=True, help="of rank 0")
    arguments = parser.parse_args()
    conversation = Conversation()
    work = Work(arguments)
    if conversation.begin(work.imports, work.join):
        conversation.serve(work)


class Work:
    """The tensor that is reduced."""

    def __init__(self, arguments):
        self.arguments = arguments

    def imports(self):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.store = torch, dist, None
        if self.arguments.rank == 0:
            self.store = dist.TCPStore(self.arguments.host, 0, is_master=True, wait_for_workers=False)
        return self.store.port if self.store else 0

    def join(self, host, port):
        arguments, dist = self.arguments, self.dist
        store = self.store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        if arguments.device != "cpu":
            self.torch.cuda.set_device(arguments.device)
        dist.init_process_group(
            arguments.backend, store=store, rank=arguments.rank, world_size=arguments.size
        )
        return self.torch.__version__

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
