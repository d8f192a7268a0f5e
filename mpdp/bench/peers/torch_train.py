"""PyTorch's training step as one process a rank, told what to do by ``mpdp bench train``; see ``conversation``.

Modes: ``eager``; ``compile`` (model and loss together); ``graph`` and ``compile-graph`` capture the whole step,
optimizer included, as one CUDA graph. With several ranks the model is a DistributedDataParallel (gloo, on GPUs NCCL).
Sixteen bits are autocast, with a GradScaler under float16.
"""

import argparse
import contextlib
import os
import resource
import time
from typing import Any

from conversation import Conversation

WARM_UP = 12  # also what DistributedDataParallel needs before a capture
CPU_SECONDS = 6.0  # fewer steps where they take longer
torch: Any = None  # imported once the pipe is open
dist: Any = None
torch_models: Any = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", required=True, help="of rank 0")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples a rank")
    parser.add_argument("--mode", choices=["eager", "compile", "graph", "compile-graph"], default="eager")
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--clip-norm", type=float, default=None, help="clip gradients as well")
    arguments = parser.parse_args()
    if "graph" in arguments.mode:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # its watchdog breaks captures
    conversation = Conversation()
    work = Work(arguments)
    if conversation.begin(work.imports, work.join):
        conversation.serve(work)


class Work:
    """The model, and one step of it."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.gpu = arguments.device != "cpu"

    def imports(self):
        import torch
        import torch.distributed as dist
        import torch_models

        globals().update(torch=torch, dist=dist, torch_models=torch_models)
        if self.gpu:
            torch.cuda.set_device(self.arguments.device)
        self.store = None
        if self.arguments.size > 1 and self.arguments.rank == 0:
            self.store = dist.TCPStore(self.arguments.host, 0, is_master=True, wait_for_workers=False)
        return self.store.port if self.store else 0

    def join(self, host, port):
        arguments = self.arguments
        if arguments.size > 1:
            store = self.store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            dist.init_process_group(
                arguments.backend, store=store, rank=arguments.rank, world_size=arguments.size
            )
        if self.gpu:
            torch.zeros(1, device=arguments.device)  # makes CUDA's context, which counts for nobody
        return torch.__version__

    # -- what the parent asks for

    def prepare(self):
        """Build everything, warm up and capture."""
        before = peak_resident()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        self.build(tuned=True)
        self.run = self.step
        if "graph" in self.arguments.mode:
            self.run = self.capture()
        else:
            start = time.perf_counter()
            for done in range(WARM_UP):
                if done > 1 and not self.gpu and time.perf_counter() - start > CPU_SECONDS:
                    break
                self.step()
        self.finish()
        peak = torch.cuda.max_memory_allocated() if self.gpu else peak_resident() - before
        return {"peak_bytes": peak, "parameters": sum(p.numel() for p in self.model.parameters())}

    def block(self, warm_up, steps):
        """Return the seconds of a step."""
        for _ in range(warm_up):
            self.run()
        if self.arguments.size > 1:
            dist.barrier()
        self.finish()
        start = time.perf_counter()
        for _ in range(steps):
            self.run()
        self.finish()
        return {"seconds": (time.perf_counter() - start) / steps}

    def profile(self, steps):
        """Return the seconds a step of each kernel on the GPU, by name."""
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        self.run()
        with torch.profiler.profile(activities=kinds) as profiler:
            for _ in range(steps):
                self.run()
            self.finish()
        found: dict[str, float] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[event.name] = found.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6 / steps
        return {"kernels": found}

    def losses(self, count, path):
        """Write the initial weights and data to ``path``, and return the losses of ``count`` updates."""
        import numpy

        self.build(tuned=False)
        arrays: dict[str, Any] = {
            name: p.detach().cpu().numpy().copy() for name, p in self.model.named_parameters()
        }
        arrays |= {"x": self.x.cpu().contiguous().numpy(), "y": self.y.cpu().numpy()}
        if "graph" in self.arguments.mode:
            raise ValueError("losses: expected a mode that is not captured, got " + self.arguments.mode)
        losses = [float(self.step().detach()) for _ in range(count)]
        arrays["losses"] = numpy.array(losses)
        with open(path, "wb") as file:
            numpy.savez(file, **arrays)
        return {"losses": losses}

    # -- the step

    def build(self, tuned):
        arguments = self.arguments
        precision = arguments.precision
        exact = precision == "float32"
        torch.set_float32_matmul_precision("highest" if exact else "high")
        torch.backends.cudnn.allow_tf32 = not exact
        torch.backends.cudnn.benchmark = tuned
        model, x, y = torch_models.build(arguments.workload, arguments.batch, arguments.rank)
        self.model, self.x, self.y = (value.to(arguments.device) for value in (model, x, y))
        self.optimizer = torch_models.optimizer_of(
            arguments.workload, list(self.model.parameters()), arguments.device
        )
        self.scaler = torch.amp.GradScaler("cuda" if self.gpu else "cpu") if precision == "float16" else None
        module = self.model
        if arguments.size > 1:
            with self.side_stream() if "graph" in arguments.mode else contextlib.nullcontext():
                module = torch.nn.parallel.DistributedDataParallel(
                    self.model, gradient_as_bucket_view=True, static_graph=arguments.mode == "eager"
                )
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
        kind = "cuda" if self.gpu else "cpu"

        def loss_of(x, y):
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                return torch.nn.functional.cross_entropy(module(x), y)

        self.loss_of = torch.compile(loss_of) if "compile" in arguments.mode else loss_of

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.x, self.y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.arguments.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.arguments.clip_norm, foreach=True)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    @contextlib.contextmanager
    def side_stream(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self):
        with self.side_stream():
            for _ in range(WARM_UP):
                self.step()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.step()
        for _ in range(2):
            self.graph.replay()
        return self.graph.replay

    def finish(self):
        if self.gpu:
            torch.cuda.synchronize()


def peak_resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
