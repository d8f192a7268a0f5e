"""PyTorch DistributedDataParallel on the ``mlp`` and ``convnet`` workloads; rank 0 prints one JSON line.

    torchrun --nproc_per_node 2 mpdp/bench/peers/torch_train.py mlp

The step is the one of ``mpdp bench train``: data on the device, forward, backward with overlapped reduction,
update.
"""

import argparse
import json
import os
import statistics
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=["mlp", "convnet"])
    parser.add_argument("--batch", type=int, default=None, help="samples a rank (default: the workload's)")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block")
    arguments = parser.parse_args()

    import torch
    import torch.distributed as dist
    from torch import nn

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    if arguments.workload == "mlp":
        batch, sample = arguments.batch or 128, [784]
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    else:
        batch, sample = arguments.batch or 64, [1, 28, 28]
        layers = [
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ]
        layers += [nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(batch, *sample, generator=generator)
    y = torch.randint(0, 10, (batch,), generator=generator)

    def step():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def block(steps):
        if size > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64)
        if size > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    for _ in range(12):
        step()
    steps = max(5, int(arguments.seconds / block(10)))
    blocks = [block(steps) for _ in range(arguments.blocks)]
    seconds = statistics.median(blocks)
    if rank == 0:
        result = {
            "system": f"torch-{torch.__version__}",
            "workload": arguments.workload,
            "device": "cpu",
            "ranks": size,
            "step_us": seconds * 1e6,
            "block_step_us": [b * 1e6 for b in blocks],
            "items_per_second": batch * size / seconds,
        }
        print(json.dumps(result), flush=True)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
