"""Convolution and pooling of a GPU, with channels last: cuDNN's plans, and kernels of our own around them.

Part of ``kernels.cuda``; the docstrings are in ``kernels.base``. What cuDNN does not do (float64, shapes without a
plan, no ``nvidia-cudnn-frontend``) goes the plain way of ``windows``, by matrix products.

Shapes: N samples, C channels in, O out, H x W pixels in, P x Q out, I x J the window.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import MissingDependencyError
from .base import Array, Shape
from .cuda_colours import CudaColours
from .cuda_layouts import MOST_NARROW, image_types
from .cudnn import Plan
from .cudnn_convolution import CudnnConvolution, Problem
from .image_interface import Into
from .precision import is_half, tf32_allowed, wide
from .windows import PlainWindows, Windows

_TIMED_PLANS, _TIMED_RUNS = 8, 5  # with plans="timed"
_BUILT_WINDOWS = (2, 3)  # lengths that kernels are built for
_LINE_THREADS, _LINE_BLOCKS = 128, 16_384  # of kernels that go over lines of pixels
_MOST_PLACES = 254  # of a window whose maximum is remembered as a byte


class CudaImages(CudaColours, PlainWindows):
    """Convolution and pooling with channels last. **Local.**"""

    _cudnn: CudnnConvolution | None = None
    _without_cudnn = False  # looked for and not found
    _timing_stream: Any = None

    # -- convolution ---------------------------------------------------------------------------------------

    def conv2d(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        windows: Windows,
        groups: int,
        relu: bool,
        engine: str = "auto",
    ) -> Array:
        xp = self.xp
        fused = self._convolutions(x, engine)
        if fused is None:
            return super().conv2d(x, weight, bias, windows, groups, relu)
        images, filters, moves = self.prepared(x, weight, windows, groups)
        problem = _problem("forward" if bias is None else "forward_bias", images, filters, moves)
        plan = self._convolution(fused, problem)
        if plan is None and bias is not None:
            problem = problem._replace(kind="forward")
            plan = self._convolution(fused, problem)
        if plan is None:
            _refuse(engine, problem)
            return super().conv2d(x, weight, bias, windows, groups, relu)
        n, outputs, down, across = problem.out
        out = xp.empty((n, down, across, outputs), x.dtype)
        inside = problem.kind == "forward_bias"
        self._launched(fused, plan, images, filters, *((bias,) if inside else ()), out)
        if relu or (bias is not None and not inside):
            vector = self.vector(outputs, out, *(() if bias is None or inside else (bias,)))
            self._images(
                "bias_relu", x.dtype, vector, out.size // vector,
                out, None if inside else bias, out, n * down * across, outputs, outputs, relu=relu,
            )  # fmt: skip
        return self.channels_first(out)

    def conv2d_backward(
        self,
        g: Array,
        x: Array,
        weight: Array,
        out: Array | None,
        windows: Windows,
        groups: int,
        wants: tuple[bool, bool, bool],
        into: Into = (None, None),
        engine: str = "auto",
    ) -> tuple[Array | None, Array | None, Array | None]:
        xp = self.xp
        fused = self._convolutions(x, engine)
        if fused is None:
            return super().conv2d_backward(g, x, weight, out, windows, groups, wants)
        want_x, want_weight, want_bias = wants
        if out is not None:
            g = self.relu_backward(self.channels_first(self.channels_last(g)), out)
        problems: list[Problem] = []
        if want_x:
            n, channels, height, width = x.shape
            described = (n, channels, height, width), weight.shape, windows
            problems.append(Problem("images", x.dtype.name, _rounds(x), *described))
        if want_weight:
            images, filters, moves = self.prepared(x, weight, windows, groups)
            problems.append(_problem("weight", images, filters, moves))
        for problem in problems:
            if self._convolution(fused, problem) is None:
                _refuse(engine, problem)
                return super().conv2d_backward(g, x, weight, None, windows, groups, wants)
        g = self.channels_last(g)
        gx = gweight = gbias = None
        if want_x:
            found = xp.empty((n, height, width, channels), x.dtype)
            self._launched(fused, self._convolution(fused, problems[0]), g, self.flat(weight), found)
            gx = self.channels_first(found)
        if want_weight:
            gweight = self._weight_gradient(fused, problems[-1], images, g, weight, windows, into[0])
        if want_bias:
            rows, target = g.reshape(-1, g.shape[-1]), into[1]
            if target is None:
                gbias = self.sum_to(rows, rows.shape[1:], xp.empty(rows.shape[1], wide(g.dtype)))
            else:
                gbias = self.sum_to(rows, rows.shape[1:], *target)
        return gx, gweight, gbias

    def _weight_gradient(
        self,
        fused: CudnnConvolution,
        problem: Problem,
        images: Array,
        g: Array,
        weight: Array,
        windows: Windows,
        target: tuple[Array, float] | None,
    ) -> Array:
        """Return the gradient of the weight, written to the target where there is one.

        cuDNN writes it in 16 bits where the operands have 16: into float32 it is 20 times as slow (measured).
        """
        xp = self.xp
        plan = self._convolution(fused, problem)
        whole = problem.weight == weight.shape
        if target is not None and whole and target[1] == 0.0 and target[0].dtype == g.dtype:
            self._launched(fused, plan, images, g, target[0])
            return target[0]
        found = xp.empty(problem.weight, g.dtype)
        self._launched(fused, plan, images, g, found)
        found = self.unprepared(found, weight, windows)
        return found if target is None else self.store(found, *target)

    def _convolutions(self, x: Array, engine: str) -> CudnnConvolution | None:
        """Return cuDNN's convolutions, None for the plain way."""
        known = x.dtype == np.float32 or is_half(x.dtype)
        if engine == "cudnn" and not known:
            raise ValueError(f'engine: expected images of 16 or 32 bits, got {x.dtype}; use engine="auto"')
        if engine == "plain" or not known or x.size == 0:
            return None
        if self._cudnn is None and (engine == "cudnn" or not self._without_cudnn):
            try:
                gpu = self._runtime.getDeviceProperties(self.device.ordinal)["name"].decode()
                self._cudnn = CudnnConvolution(gpu)
                self.plan_book.on_change.append(self._cudnn.forget)
            except MissingDependencyError as error:
                if engine == "cudnn":
                    raise
                self._without_cudnn = True
                logging.getLogger("mpdp.kernels").warning(
                    "convolutions by matrix products, slower, and in no captured step: %s", error
                )
        return self._cudnn

    def _convolution(self, fused: CudnnConvolution, problem: Problem) -> Plan | None:
        def find(key: str) -> str | None:
            return self.plan_book.find(key, lambda: self._fastest(fused, problem))

        return fused.plan(problem, self.xp.cuda.get_current_stream().ptr, find)

    def _fastest(self, fused: CudnnConvolution, problem: Problem) -> str | None:
        """Time the first plans of a problem and return the name of the fastest; waits for the device."""
        xp, n = self.xp, problem.x[0]
        x, out = ((n, *shape[2:], shape[1]) for shape in (problem.x, problem.out))
        shapes: dict[str, tuple[Shape, ...]] = {
            "forward": (x, problem.weight, out),
            "forward_bias": (x, problem.weight, out[-1:], out),
            "images": (out, problem.weight, x),
            "weight": (x, out, problem.weight),
        }
        arrays = [xp.zeros(shape, _dtype(problem.dtype)) for shape in shapes[problem.kind]]
        xp.cuda.get_current_stream().synchronize()
        if self._timing_stream is None:
            self._timing_stream = xp.cuda.Stream(non_blocking=True)
        times = {}
        with self._timing_stream as stream:
            for plan in fused.candidates(problem, stream.ptr, _TIMED_PLANS):
                self._launched(fused, plan, *arrays)
                stream.begin_capture()  # the host takes longer than a small convolution
                for _ in range(_TIMED_RUNS):
                    self._launched(fused, plan, *arrays)
                graph = stream.end_capture()
                for _ in range(2):
                    start, end = xp.cuda.Event(), xp.cuda.Event()
                    start.record(stream)
                    graph.launch(stream)
                    end.record(stream)
                    end.synchronize()
                    times[plan.name] = xp.cuda.get_elapsed_time(start, end)
        return min(times, key=times.__getitem__) if len(times) > 1 else None

    def _launched(self, fused: CudnnConvolution, plan: Plan | None, *arrays: Array) -> None:
        assert plan is not None
        workspace = self.xp.empty(plan.workspace_bytes, np.uint8)
        addresses = tuple(a.data.ptr for a in arrays)
        fused.run(plan, addresses, workspace.data.ptr, self.xp.cuda.get_current_stream().ptr)

    # -- pooling -------------------------------------------------------------------------------------------

    def max_pool2d(self, x: Array, windows: Windows, relu: bool) -> tuple[Array, Any]:
        if math.prod(windows.size) > _MOST_PLACES or not x.size:
            out, saved = super().max_pool2d(x, windows, relu)
            return out, (None, saved)
        images, shape = self.channels_last(x), x.shape
        down, across = windows.fit(*shape[2:])
        out = self.xp.empty((shape[0], down, across, shape[1]), x.dtype)
        place = self.xp.empty(out.shape, np.uint8)
        vector = self.vector(shape[1], images)
        self._pool("max_pool", vector, out, (images, out, place), shape, windows, relu, images.size)
        return self.channels_first(out), (shape, place)

    def max_pool2d_backward(self, g: Array, saved: Any, windows: Windows, relu: bool) -> Array:
        shape, place = saved
        if shape is None:
            return super().max_pool2d_backward(g, place, windows, relu)
        return self._spread("max_pool_backward", g, shape, windows, place)

    def avg_pool2d(self, x: Array, windows: Windows) -> Array:
        if not x.size:
            return super().avg_pool2d(x, windows)
        images, shape = self.channels_last(x), x.shape
        out = self.xp.empty((shape[0], *windows.fit(*shape[2:]), shape[1]), x.dtype)
        vector = self.vector(shape[1], images)
        self._pool("avg_pool", vector, out, (images, out), shape, windows, False, images.size)
        return self.channels_first(out)

    def avg_pool2d_backward(self, g: Array, shape: Shape, windows: Windows) -> Array:
        if not g.size:
            return super().avg_pool2d_backward(g, shape, windows)
        return self._spread("avg_pool_backward", g, shape, windows)

    def global_avg_pool2d(self, x: Array) -> Array:
        if not x.size:
            return super().global_avg_pool2d(x)
        return self.avg_pool2d(x, Windows(x.shape[2:])).reshape(x.shape[:2])

    def global_avg_pool2d_backward(self, g: Array, shape: Shape) -> Array:
        if not g.size or 0 in shape:
            return super().global_avg_pool2d_backward(g, shape)
        return self.avg_pool2d_backward(g.reshape(*g.shape, 1, 1), shape, Windows(shape[2:]))  # type: ignore[arg-type]

    def _spread(self, name: str, g: Array, shape: Shape, windows: Windows, *places: Array) -> Array:
        """Run the backward kernel of a pooling: a thread a pixel, which adds up its windows in order."""
        g = self.channels_last(g)
        out = self.xp.empty((shape[0], *shape[2:], shape[1]), g.dtype)
        vector = self.vector(shape[1], g)
        self._pool(name, vector, out, (g, *places, out), shape, windows, False, g.size)
        return self.channels_first(out)

    def _pool(
        self, name: str, vector: int, out: Array, arrays: tuple[Array, ...], shape: Shape, windows: Windows,
        relu: bool, read: int,
    ) -> None:  # fmt: skip
        """Run a kernel of pooling over the lines of ``out``, which reads ``read`` elements."""
        n, down, across, channels = out.shape
        (height, width), (step, other) = windows.size, windows.stride
        square = height == width and step == other and height in _BUILT_WINDOWS
        built = image_types(
            out.dtype,
            vector,
            relu,
            (height, step) if square else (0, 0),
            wide=max(out.size, read) >= MOST_NARROW,
        )
        blocks = max(1, -(-across * (channels // vector) // _LINE_THREADS))
        lines = max(1, min(n * down, _LINE_BLOCKS // blocks))
        self.launch("images", name, built, (blocks, lines), _LINE_THREADS, *arrays, *_numbers(shape, windows))


def _problem(kind: Any, images: Array, weight: Array, windows: Windows) -> Problem:
    n, height, width, channels = images.shape
    return Problem(
        kind, images.dtype.name, _rounds(images), (n, channels, height, width), weight.shape, windows
    )


def _rounds(x: Array) -> bool:
    """Return whether float32 may be rounded to TF32."""
    return bool(x.dtype == np.float32 and tf32_allowed())


def _dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _refuse(engine: str, problem: Problem) -> None:
    if engine == "cudnn":
        raise ValueError(f'engine: expected a convolution that cuDNN has, got {problem}; use engine="auto"')
    logging.getLogger("mpdp.kernels").warning(
        "convolution by matrix products, slower, and in no captured step: cuDNN has no plan for %s", problem
    )


def _numbers(shape: Shape, windows: Windows) -> tuple[int, ...]:
    """Return what the pooling kernels are told of images (N, C, H, W) and windows."""
    n, channels, height, width = shape
    return (
        n, height, width, channels, *windows.fit(height, width), *windows.size, *windows.stride, *windows.padding,
    )  # fmt: skip
