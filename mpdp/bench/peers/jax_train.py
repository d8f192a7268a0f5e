"""JAX's training step of the ``mlp`` workload on one device, told what to do by ``mpdp bench train``.

The step is one ``jit`` with the weights' and velocities' buffers donated. float32 products are in float32 (JAX's own
default on a GPU is TF32). See ``conversation`` for what passes the pipe.
"""

import argparse
import functools
import os
import resource
import time
from itertools import pairwise
from typing import Any

from conversation import Conversation

SIZES = (784, 512, 512, 10)
jax: Any = None  # imported once the pipe is open
jnp: Any = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workload", choices=["mlp"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="float32")
    parser.add_argument("--clip-norm", type=float, default=None, help="clip gradients as well")
    arguments, _ = parser.parse_known_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    conversation = Conversation()
    work = Work(arguments)
    if conversation.begin(work.imports, work.join):
        conversation.serve(work)


class Work:
    def __init__(self, arguments):
        self.arguments = arguments

    def imports(self):
        import jax
        import jax.numpy as jnp

        globals().update(jax=jax, jnp=jnp)

        if self.arguments.size > 1:
            raise ValueError(f"expected one rank, got {self.arguments.size}")
        return 0

    def join(self, host, port):
        precision = self.arguments.precision
        jax.config.update(
            "jax_default_matmul_precision", "highest" if precision == "float32" else "tensorfloat32"
        )
        ordinal = self.arguments.device.partition(":")[2]
        self.device = jax.devices()[int(ordinal or 0)]
        jax.device_put(jnp.zeros(1), self.device).block_until_ready()
        return jax.__version__

    def prepare(self):
        """Build everything and warm up."""
        before = peak_resident()
        batch, key = self.arguments.batch, jax.random.PRNGKey(0)
        params = [(jax.random.normal(key, (i, o)) * 0.03, jnp.zeros(o)) for i, o in pairwise(SIZES)]
        x, y = jax.random.normal(key, (batch, SIZES[0])), jax.random.randint(key, (batch,), 0, SIZES[-1])
        velocity = jax.tree.map(jnp.zeros_like, params)
        self.params, self.velocity, self.x, self.y = jax.device_put((params, velocity, x, y), self.device)
        self.step = make_step(self.arguments.clip_norm, self.arguments.precision == "bfloat16")
        self.block(0, 12)
        stats = self.device.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use", peak_resident() - before)
        count = sum(a.size for pair in self.params for a in pair)
        return {"peak_bytes": peak, "parameters": count}

    def block(self, warm_up, steps):
        """Return the seconds of a step."""
        loss = self.many(warm_up)
        start = time.perf_counter()
        loss = self.many(steps)
        loss.block_until_ready()
        return {"seconds": (time.perf_counter() - start) / steps}

    def many(self, steps):
        step, params, velocity, x, y = self.step, self.params, self.velocity, self.x, self.y
        loss = None
        for _ in range(steps):
            params, velocity, loss = step(params, velocity, x, y)
        self.params, self.velocity = params, velocity
        if loss is not None:
            loss.block_until_ready()
        return loss


def make_step(clip_norm, half):
    def loss_of(params, x, y):
        h = x
        for i, (w, b) in enumerate(params):
            if half:
                h, w, b = h.astype(jnp.bfloat16), w.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
            h = h @ w + b
            if i < len(params) - 1:
                h = jax.nn.relu(h)
        logits = h.astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, velocity, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        if clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            factor = jnp.minimum(1.0, clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor, grads)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity), velocity, loss

    return step


def peak_resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
