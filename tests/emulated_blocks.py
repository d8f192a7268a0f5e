"""Blocks of CUDA threads on the host: the text of a kernel of ``cuda_src`` compiled by a C++ compiler.

Each thread of a block is a coroutine, so barriers and shuffles between threads are there, and copies to shared memory
arrive when they are waited for and not before. It shows whether a kernel computes what it should; speed, and the order
of memory between blocks, it can't show.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpdp.kernels.cuda_indices import CudaIndices
from mpdp.kernels.cuda_norms import CudaNorms
from mpdp.kernels.cuda_source import program

SHIM = r"""
#include <ucontext.h>
extern "C" float expf(float), logf(float), sqrtf(float);
extern "C" double sqrt(double), fabs(double), exp(double), tanh(double);
static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
extern "C" void* memcpy(void*, const void*, unsigned long);
#define __CUDA_ARCH__ 800
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
struct Index { int x, y, z; };
struct Copy { char* to; const char* from; int group; };
struct Fiber {
    ucontext_t context;
    Index index;
    bool done;
    Copy copies[128];  // that are under way, oldest first
    int under_way, groups;
};
static Fiber fibers[1024];
static char stacks[1024][1 << 16];
static int current, count;
static ucontext_t home;
static Index blockIdx, blockDim, gridDim;
#define threadIdx (fibers[current].index)
static void yield() {
    int from = current;
    do current = (current + 1) % count; while (fibers[current].done);
    if (current != from) swapcontext(&fibers[from].context, &fibers[current].context);
}
struct Barrier { int arrived, turn; };
static void meet_at(Barrier& b, int all) {
    int turn = b.turn;
    if (++b.arrived == all) b.arrived = 0, b.turn++;
    while (b.turn == turn) yield();
}
static Barrier whole, rows[16], warps[32];
static void __syncthreads() { meet_at(whole, count); }
static void bar_sync(int id, int all) { meet_at(rows[id], all); }
static char lanes[32][32][16];
template <class V> static V __shfl_xor_sync(unsigned, V value, int offset) {
    int warp = current / 32, lane = current % 32;
    memcpy(lanes[warp][lane], &value, sizeof(V));
    meet_at(warps[warp], 32);
    V out;
    memcpy(&out, lanes[warp][lane ^ offset], sizeof(V));
    meet_at(warps[warp], 32);
    return out;
}
static char* addresses[1 << 16];  // of shared memory, by number: a compiler may take no integer for an address
static unsigned known;
static unsigned __cvta_generic_to_shared(void* p) {
    addresses[known %= 1 << 16] = (char*)p;
    return known++;
}
static void copy_async(unsigned to, const void* from) {
    Fiber& f = fibers[current];
    f.copies[f.under_way++] = Copy{addresses[to], (const char*)from, f.groups};
}
static void copy_commit() { fibers[current].groups++; }
static void copy_wait(int left) {  // for all but the last groups
    Fiber& f = fibers[current];
    int kept = 0;
    for (int i = 0; i < f.under_way; i++) {
        Copy c = f.copies[i];
        if (c.group < f.groups - left) memcpy(c.to, c.from, 16);
        else f.copies[kept++] = c;
    }
    f.under_way = kept;
}
static void tensor_product(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    static float given[32][32][6];
    int warp = current / 32, lane = current % 32;
    unsigned all[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(given[warp][lane], all, sizeof all);
    meet_at(warps[warp], 32);
    for (int i = 0; i < 4; i++) {  // rows and columns as the instruction has them
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = sums[i];
        for (int k = 0; k < 8; k++)
            sum += given[warp][row % 8 * 4 + k % 4][row / 8 + k / 4 * 2] * given[warp][column * 4 + k % 4][4 + k / 4];
        sums[i] = sum;
    }
    meet_at(warps[warp], 32);
}
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static unsigned short to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fff;
}
static unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000) & ~0x1fffu; }  // to nearest, ties away from 0
#define __expf expf
"""

RUN = r"""
static void (*body)();
static void enter() {
    body();
    fibers[current].done = true;
    for (int i = 0; i < count; i++)
        if (!fibers[i].done) { current = i; setcontext(&fibers[i].context); }
    setcontext(&home);
}
static void run(const int* shape, void (*f)()) {  // blocks x, y; threads x, y
    body = f;
    blockDim = {shape[2], shape[3], 1};
    gridDim = {shape[0], shape[1], 1};
    count = shape[2] * shape[3];
    for (int b = 0; b < shape[0] * shape[1]; b++) {
        blockIdx = {b % shape[0], b / shape[0], 0};
        for (int i = 0; i < count; i++) {
            Fiber& f = fibers[i];
            f.index = {i % shape[2], i / shape[2], 0};
            f.done = false;
            f.under_way = f.groups = 0;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stacks[i];
            f.context.uc_stack.ss_size = sizeof stacks[i];
            f.context.uc_link = 0;
            makecontext(&f.context, enter, 0);
        }
        current = 0;
        swapcontext(&home, &fibers[0].context);
    }
}
"""

_KERNEL = re.compile(
    r'extern "C" __global__ void\s*(?:CLUSTER\s*)?(?:__launch_bounds__\([^)]*\))?\s*(\w+)\s*\(([^)]*)\)'
)


_WHOLE = {
    "four_if": "return ok ? *(const Four<float>*)at : Four<float>{};",
    "one_if": "return ok ? *at : 0.0f;",
    "add_product": "tensor_product(sums, a0, a1, a2, a3, b0, b1);",
    "cluster_barrier": "__builtin_trap();",
}


@functools.cache
def _built(source: str, types: tuple[Any, ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels with")
    text, _ = program(source, types)
    text = re.sub(
        r'asm volatile\("bar\.sync.*?"r"\((.*?)\), "n"\((\w+)\) : "memory"\);', r"bar_sync(\1, \2);", text
    )
    text = re.sub(
        r'asm volatile\("cp\.async\.cg[^:]*::"r"\((\w+)\), "l"\((.*?)\) : "memory"\);',
        r"copy_async(\1, \2);",
        text,
    )
    text = text.replace('asm volatile("cp.async.commit_group;" ::: "memory")', "copy_commit()")
    text = text.replace('asm volatile("cp.async.wait_group 1;" ::: "memory")', "copy_wait(1)")
    text = text.replace('asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x))', "out.bits = to_bf16(x)")
    text = re.sub(
        r'asm\("cvt\.rna\.tf32\.f32 %0, %1;" : "=r"\((.*?)\) : "f"\((.*)\)\);', r"\1 = tf32(\2);", text
    )
    for name, does in _WHOLE.items():  # functions that are assembly and nothing else
        text = re.sub(
            rf"(__device__ __forceinline__ [\w<>]+ {name}\([^{{]*\) \{{).*?\n\}}",
            rf"\1 {does} }}",
            text,
            flags=re.DOTALL,
        )
    text = re.sub(
        r'asm volatile\("(mapa|ld\.shared::cluster).*?\)\);', "__builtin_trap();", text
    )  # of clusters
    text = re.sub(r"\basm\((.*?)\);", "__builtin_trap();", text)  # float16, which no test here uses
    left = [line for line in text.splitlines() if re.search(r"\basm\b", line)]
    assert not left, left
    launchers = []
    for name, parameters in _KERNEL.findall(text):
        # Arguments come as eight bytes each, as the package passes them.
        kinds = [re.sub(r"\s*\b\w+$", "", " ".join(p.split())) for p in parameters.split(",")]
        loads = ", ".join(f"*({kind.strip()}*)(given + {8 * i})" for i, kind in enumerate(kinds))
        launchers.append(
            f'extern "C" void launch_{name}(const int* shape, const char* arguments) {{ given = arguments; '
            f"run(shape, [] {{ {name}({loads}); }}); }}"
        )
    folder = Path(tempfile.mkdtemp(prefix="mpdp-emulated-"))
    (folder / "k.cpp").write_text("\n".join([SHIM, text, RUN, "static const char* given;", *launchers]))
    built = [
        compiler,
        "-std=c++20",
        "-O1",
        "-w",
        "-fno-gnu-unique",
        "-shared",
        "-fPIC",
        "-o",
        str(folder / "k.so"),
        str(folder / "k.cpp"),
    ]
    done = subprocess.run(built, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(folder / "k.so"))
    shutil.rmtree(folder)
    return library


class _Array(np.ndarray):
    """An array that says its address as CuPy's do."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def place(value: Any) -> Any:
    """Return a copy of an array where the emulated kernels take it from, at a multiple of 64 bytes."""
    value = np.asarray(value)
    memory = np.empty(value.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    out = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape).view(_Array)
    out[...] = value
    return out


class EmulatedKernels(CudaNorms, CudaIndices):
    """The kernels of a GPU that need nothing but ``launch``, on NumPy arrays. **Local.**"""

    def __init__(self) -> None:
        self.xp = SimpleNamespace(  # type: ignore[assignment]
            empty=lambda shape, dtype: place(np.empty(shape, dtype)), ascontiguousarray=place, ndarray=_Array
        )

    def launch(
        self, source: str, name: str, built: tuple[Any, ...], blocks: Any, threads: Any, *arguments: Any
    ) -> None:
        grid = blocks if isinstance(blocks, tuple) else (blocks, 1)
        block = threads if isinstance(threads, tuple) else (threads, 1)
        values = b"".join(_eight_bytes(a) for a in arguments)
        shape = (ctypes.c_int * 4)(*grid, *block)
        getattr(_built(source, built), f"launch_{name}")(shape, ctypes.c_char_p(values))

    def _check(self, index: Any, limit: int, site: int, ignore: int | None) -> Any:
        return None  # tests of a real GPU look at bad indices


def _eight_bytes(value: Any) -> bytes:
    if value is None:
        return bytes(8)
    if isinstance(value, np.ndarray):
        return np.uint64(value.ctypes.data).tobytes()
    return np.float64(value).tobytes() if isinstance(value, float) else np.int64(value).tobytes()
