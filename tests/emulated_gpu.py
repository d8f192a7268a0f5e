"""A GPU on the host, for the transports' kernels: the text of ``direct.cu`` compiled by a C++ compiler.

A block is a thread of the host with one CUDA thread in it, memory is the process's own, a handle is an address, and a
launch is done when it returns. Ranks are threads. What it cannot show is the order of memory between GPUs, packs
that several threads of a block share, and capture.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpdp.comm.activity import Activity
from mpdp.comm.base import Communicator
from mpdp.comm.cuda_gpu import source
from mpdp.device import Device

SHIM = r"""
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#include <sched.h>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef long long i64; typedef unsigned long long u64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct uint4 { u32 x, y, z, w; } __attribute__((aligned(16), may_alias));
struct Index { unsigned x; };
static thread_local Index blockIdx, gridDim;
static const Index threadIdx{0}, blockDim{1};
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(n)
#define __shared__ static thread_local
#define GIVEN const
static void __syncthreads() {}
static int __syncthreads_and(int x) { return x != 0; }
static int __syncthreads_or(int x) { return x != 0; }
static i64 thread() { return blockIdx.x; }
static i64 threads() { return gridDim.x; }
static float as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static u32 as_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float wide(bf16 x) { return as_float((u32)x.bits << 16); }
inline float wide(f16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
template <class T> struct As;
template <> struct As<f16> { static f16 of(float x) { _Float16 h = (_Float16)x; f16 o; memcpy(&o, &h, 2); return o; } };
template <> struct As<bf16> {
    static bf16 of(float x) {
        u32 bits = as_bits(x);
        if (x == x) bits += 0x7fff + ((bits >> 16) & 1); else bits |= 0x400000;
        return bf16{(u16)(bits >> 16)};
    }
};
static void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static u64 load_acquire(const u64* word) { sched_yield(); return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store_flag(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
static u64 load_flag(const u64* word) { sched_yield(); return __atomic_load_n(word, __ATOMIC_RELAXED); }
static void store_line(char* line, u64 content, u32 number) {
    store_flag((u64*)line, (u64)number << 32 | (u32)content);
    sched_yield();
    store_flag((u64*)line + 1, (u64)number << 32 | content >> 32);
}
static bool load_line(const char* line, u64& content, u32 number) {
    const u64 one = load_flag((const u64*)line), other = load_flag((const u64*)line + 1);
    content = other << 32 | (u32)one;
    return one >> 32 == number && other >> 32 == number;
}
static u32 load_relaxed(const u32* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static void store_relaxed(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline float plus(float a, float b) { return a + b; }
inline double plus(double a, double b) { return a + b; }
inline bool above(float a, float b) { return a > b; }
"""
ENTRY = r"""
template <class F> static void run(int blocks, F body) {
    std::vector<std::thread> running;
    for (int b = 0; b < blocks; b++)
        running.emplace_back([=] { blockIdx.x = b; gridDim.x = blocks; body(); });
    for (auto& each : running) each.join();
}
extern "C" void launch_collective(int blocks, const Lane* lane, const Call* call) {
    run(blocks, [=] { collective(*lane, *call); });
}
#if COPIES
extern "C" void launch_send_mail(int blocks, const Lane* lane, char* array, i64 bytes, i64 to) {
    run(blocks, [=] { send_mail(*lane, array, bytes, to); });
}
extern "C" void launch_receive_mail(int blocks, const Lane* lane, char* array, i64 bytes, i64 from) {
    run(blocks, [=] { receive_mail(*lane, array, bytes, from); });
}
#endif
"""


@functools.cache
def compiler():
    """Return a C++ compiler that knows float16, or None."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return None
    test = subprocess.run(
        [found, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"],
        input="_Float16 x;",
        text=True,
        capture_output=True,
    )
    return found if test.returncode == 0 else None


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="mpdp-emulated-")


_building = threading.Lock()
_libraries = {}


def _library(built):
    with _building:
        if built not in _libraries:
            dtype, size, copies = built
            text = "\n".join([SHIM, source(*built).replace("#pragma unroll", ""), ENTRY])
            path = Path(_folder().name, f"{dtype.name}-{size}-{int(copies)}.cpp")
            path.write_text(text)
            output = path.with_suffix(".so")
            subprocess.run(
                [
                    compiler(),
                    "-std=c++17",
                    "-O1",
                    "-fno-strict-aliasing",
                    "-ffp-contract=off",
                    "-shared",
                    "-fPIC",
                ]
                + ["-pthread", "-o", output, path],
                check=True,
            )
            _libraries[built] = ctypes.CDLL(str(output))
        return _libraries[built]


class Array:
    """Memory of an emulated GPU: nothing on the host may read it by accident."""

    def __init__(self, memory, device, owner=None):
        self.memory, self.device, self._owner = memory, device, owner
        self.data = SimpleNamespace(ptr=memory.ctypes.data)
        self.dtype, self.shape, self.ndim = memory.dtype, memory.shape, memory.ndim
        self.size, self.itemsize, self.nbytes = memory.size, memory.itemsize, memory.nbytes
        self.strides, self.flags = memory.strides, memory.flags

    def __getitem__(self, key):
        return Array(self.memory[key], self.device, self._owner)

    def view(self, dtype):
        return Array(self.memory.view(dtype), self.device, self._owner)

    def __array__(self, *_, **__):
        raise AssertionError("device memory was read on the host")


class EmulatedGpu:
    """Implements what :class:`mpdp.comm.cuda_gpu.CudaGpu` does; keeps count of what is held."""

    multiprocessors = 8

    def __init__(self, name=b"gpu"):
        self.device = Device("cuda", 0)
        self.identity = name
        self.held, self.opened, self.log = {}, [], []
        self.room = 1 << 30

    def allocate(self, nbytes):
        if nbytes > self.room:
            from mpdp.errors import DeviceError

            raise DeviceError(f"device {self.device}: expected {nbytes} bytes for communication, got none")
        memory = np.zeros(nbytes + 64, np.uint8)
        pointer = memory.ctypes.data + -memory.ctypes.data % 64
        self.held[pointer] = memory
        return pointer

    def free(self, pointer):
        self.log.append(("free", pointer))
        del self.held[pointer]

    def export(self, pointer):
        return pointer.to_bytes(8, "little")

    def open(self, handle):
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, pointer):
        self.log.append(("close", pointer))
        self.opened.remove(pointer)

    def pinned(self, words):
        return np.zeros(words, np.uint32)

    def write(self, pointer, data):
        ctypes.memmove(pointer, data.ctypes.data, data.nbytes)

    def read(self, pointer, data):
        ctypes.memmove(data.ctypes.data, pointer, data.nbytes)

    def array(self, pointer, nbytes, owner):
        memory = np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), np.uint8)
        return Array(memory, self.device, owner)

    def stream(self):
        return "lane"

    def current(self):
        return "current"

    def event(self):
        return []

    def mark(self, event, stream):
        event[:] = [stream]

    def join(self, stream, event):
        assert event and event[0] != stream

    def capturing(self, stream):
        return False

    def done(self, stream):
        return True

    def synchronize(self):
        self.log.append(("synchronize", 0))

    def prepare(self, name, built, blocks, threads, arguments):
        assert threads % 32 == 0 and threads <= 512
        return functools.partial(self._launch, name, built, blocks, arguments)

    def _launch(self, name, built, blocks, arguments, stream):
        assert stream in (self.current(), self.stream())
        passed = []
        for value in arguments:
            if isinstance(value, np.void):
                passed.append(np.frombuffer(value.tobytes(), np.uint8))
            else:
                passed.append(ctypes.c_longlong(int(value)))
        words = [ctypes.c_void_p(p.ctypes.data) if isinstance(p, np.ndarray) else p for p in passed]
        getattr(_library(built), f"launch_{name}")(ctypes.c_int(blocks), *words)


class CountedMarks:
    """Stands in for a StreamClock: points in the work of streams are numbers."""

    def __init__(self):
        self.marked = []

    def mark(self, stream):
        self.marked.append(stream)
        return len(self.marked)

    def nanoseconds(self, mark):
        return mark


class ThreadRanks(Communicator):
    """A host communicator over threads, simple enough to be looked through."""

    transport = "fake"

    def __init__(self, rank, shared):
        super().__init__(rank, shared.size, Activity())
        self.shared = shared
        self.closed = False

    @classmethod
    def world(cls, size):
        shared = SimpleNamespace(size=size, barrier=threading.Barrier(size), slots=[None] * size, mail={})
        return [cls(rank, shared) for rank in range(size)]

    def _exchange(self, value):
        self.shared.slots[self.rank] = value
        self.shared.barrier.wait(30)
        values = list(self.shared.slots)
        self.shared.barrier.wait(30)
        return values

    def _all_reduce(self, array, op, lane):
        every = self._exchange(array.copy())
        array[...] = np.sum(every, axis=0) if op == "sum" else np.max(every, axis=0)

    def _reduce(self, array, op, root, lane):
        self._all_reduce(array, op, lane)

    def _broadcast(self, array, root, lane):
        array[...] = self._exchange(array.copy())[root]

    def _reduce_scatter(self, array, bounds, op, lane):
        self._all_reduce(array, op, lane)

    def _all_gather(self, array, bounds, lane):
        for rank, other in enumerate(self._exchange(array.copy())):
            array[bounds[rank] : bounds[rank + 1]] = other[bounds[rank] : bounds[rank + 1]]

    def _exclusive_sum(self, value, lane):
        return sum(self._exchange(value)[: self.rank])

    def _barrier(self, lane):
        self._exchange(None)

    def _send(self, array, to, lane):
        raise NotImplementedError

    def _recv(self, array, source, lane):
        raise NotImplementedError

    def duplicate(self):
        shared = self._exchange(
            SimpleNamespace(
                size=self.size, barrier=threading.Barrier(self.size), slots=[None] * self.size, mail={}
            )
        )[0]
        other = ThreadRanks(self.rank, shared)
        other.activity = self.activity
        return other

    def close(self):
        self.closed = True


def in_all(ranks, action, seconds=60):
    """Call ``action(rank)`` in a thread for each of ``ranks`` and return the results; an error is raised."""
    results, errors = [None] * len(ranks), []

    def call(index):
        try:
            results[index] = action(ranks[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def needed():
    """Skip the test where there is no C++ compiler."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler that knows float16")
