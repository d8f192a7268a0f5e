// Layer norm with what stands beside it in a transformer: the sum that is normalised, and in backward the gradient that
// comes past the norm. T: stored type; P: of weight and bias; W: of the arithmetic; O: of their gradients; WIDTH: of a
// row, a multiple of PACK; LANES: threads a row; THREADS: of a block.
//
// Blocks are few and go from row to row. While a thread works on its part of a row, its part of the next one is on its
// way to shared memory; no other thread reads that, so nothing waits for a barrier.

#define PACK ((int)(16 / sizeof(T)))
#define PACKS (WIDTH / PACK)
#define STEPS ((PACKS + LANES - 1) / LANES)
#define GROUPS (THREADS / LANES)  // rows that a block works on at once

#define OVER _Pragma("unroll") for (int s = 0; s < STEPS; s++)
#define EACH _Pragma("unroll") for (int k = 0; k < PACK; k++)
#define HERE(s) (PACKS % LANES == 0 || (s) * LANES + lane < PACKS)
#define AT(s) (((s) * LANES + lane) * PACK)

#if __CUDA_ARCH__ >= 800
#define ROOM (40 * 1024)
#else
#define ROOM 0  // no copies that run beside the arithmetic
#endif

// Parts of COUNT arrays' rows, this one and the next.
template <int COUNT> struct Rows {
    static constexpr bool staged = 2 * COUNT * STEPS * THREADS * 16 <= ROOM;
    static constexpr int each = STEPS * THREADS;

    static __device__ __forceinline__ Sixteen<T>* memory() {
        __shared__ Sixteen<T> all[staged ? 2 * COUNT * each : 1];
        return all;
    }
    // Starts to fetch a row of array `which` for turn 0 or 1.
    static __device__ __forceinline__ void fetch(const T* row, int which, int turn, int lane) {
        if (!staged || !row) return;
        Sixteen<T>* to = memory() + (turn * COUNT + which) * each + threadIdx.x;
        OVER {
            if (HERE(s)) {
                u32 at = (u32)__cvta_generic_to_shared(to + s * THREADS);
#if __CUDA_ARCH__ >= 800
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(row + AT(s)) : "memory");
#endif
            }
        }
    }
    static __device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
        if (staged) asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    // Waits for all but the row that was fetched last.
    static __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 800
        if (staged) asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ Sixteen<T> part(const T* row, int which, int turn, int s, int lane) {
        if (staged) return memory()[(turn * COUNT + which) * each + s * THREADS + threadIdx.x];
        return *(const Sixteen<T>*)(row + AT(s));
    }
};

// A barrier for the LANES threads of a row, by the hardware barrier of the row's number.
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"r"((int)threadIdx.x / LANES + 1), "n"(LANES) : "memory");
}

// The sums of two numbers over the threads of a row, for all of them; each of these calls it.
__device__ __forceinline__ void row_sums(W& a, W& b) {
    a = warp_sum(a);
    b = warp_sum(b);
    if (LANES > 32) {
        __shared__ W parts[2][THREADS / 32];
        int warp = threadIdx.x / 32, first = threadIdx.x / LANES * (LANES / 32);
        meet();  // an earlier call may still be read
        if (threadIdx.x % 32 == 0) parts[0][warp] = a, parts[1][warp] = b;
        meet();
        a = b = 0;
        for (int i = 0; i < LANES / 32; i++) a += parts[0][first + i], b += parts[1][first + i];
    }
}

#define ROW(p, row) ((p) ? (p) + (row) * WIDTH : nullptr)

// sum = x + added, rounded to T, where there is `added`; out = the normalised sum, or x.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_forward(double eps, const T* x, const T* added, const P* weight, const P* bias, T* sum, T* out, W* means,
                 W* rstds, i64 rows) {
    typedef Rows<2> Staged;
    int lane = threadIdx.x % LANES, turn = 0;
    i64 row = blockIdx.x * (i64)GROUPS + threadIdx.x / LANES, stride = gridDim.x * (i64)GROUPS;
    if (row < rows) {
        Staged::fetch(ROW(x, row), 0, 0, lane);
        Staged::fetch(ROW(added, row), 1, 0, lane);
    }
    Staged::commit();
    for (; row < rows; row += stride, turn ^= 1) {
        if (row + stride < rows) {
            Staged::fetch(ROW(x, row + stride), 0, turn ^ 1, lane);
            Staged::fetch(ROW(added, row + stride), 1, turn ^ 1, lane);
        }
        Staged::commit();
        Staged::wait();
        W v[STEPS][PACK], total = 0, none = 0;
        OVER {
            if (HERE(s)) {
                Sixteen<T> a = Staged::part(ROW(x, row), 0, turn, s, lane);
                if (added) {
                    Sixteen<T> b = Staged::part(ROW(added, row), 1, turn, s, lane);
                    EACH a.v[k] = As<T>::of(wide(a.v[k]) + wide(b.v[k]));
                    *(Sixteen<T>*)(sum + row * WIDTH + AT(s)) = a;
                }
                EACH total += v[s][k] = wide(a.v[k]);
            }
        }
        row_sums(total, none);
        W mean = total / WIDTH, squares = 0;
        OVER {
            if (HERE(s)) {
                EACH squares += (v[s][k] - mean) * (v[s][k] - mean);
            }
        }
        row_sums(squares, none);
        W rstd = 1 / sqrtf(squares / WIDTH + (W)eps);
        if (lane == 0) means[row] = mean, rstds[row] = rstd;
        OVER {
            if (HERE(s)) {
                W scale[PACK], shift[PACK];
                if (weight) read<PACK>(weight + AT(s), scale);
                if (bias) read<PACK>(bias + AT(s), shift);
                EACH {
                    v[s][k] = (v[s][k] - mean) * rstd;
                    if (weight) v[s][k] *= scale[k];
                    if (bias) v[s][k] += shift[k];
                }
                write<PACK>(out + row * WIDTH + AT(s), v[s]);
            }
        }
    }
}

// Writes the sums over the rows of a block. The groups add pairwise: half of them give theirs to the others, and so on.
__device__ __forceinline__ void add_groups(W (&mine)[STEPS][PACK], W* to) {
    __shared__ __align__(16) W sums[GROUPS > 1 ? GROUPS / 2 : 1][WIDTH];
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    #pragma unroll
    for (int half = GROUPS / 2; half; half /= 2) {
        __syncthreads();
        if (group >= half && group < 2 * half) {
            OVER {
                if (HERE(s)) write<PACK>(&sums[group - half][AT(s)], mine[s]);
            }
        }
        __syncthreads();
        if (group < half) {
            OVER {
                if (HERE(s)) {
                    W other[PACK];
                    read<PACK>(&sums[group][AT(s)], other);
                    EACH mine[s][k] += other[k];
                }
            }
        }
    }
    if (group) return;
    OVER {
        if (HERE(s)) write<PACK>(to + AT(s), mine[s]);
    }
}

// out = before + the gradient with respect to x, and (gridDim.x, 2, WIDTH) sums over the rows of a block of
// g * normalised x and of g. `before`, `out` and `partial` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_backward(const T* g, const T* x, const T* before, const P* weight, const W* means, const W* rstds, T* out,
                  W* partial, i64 rows) {
    typedef Rows<3> Staged;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, turn = 0;
    i64 row = blockIdx.x * (i64)GROUPS + group, stride = gridDim.x * (i64)GROUPS;
    W scales[STEPS][PACK] = {}, shifts[STEPS][PACK] = {}, mean = 0, rstd = 0;
    if (row < rows) {
        Staged::fetch(ROW(g, row), 0, 0, lane);
        Staged::fetch(ROW(x, row), 1, 0, lane);
        Staged::fetch(ROW(before, row), 2, 0, lane);
        mean = means[row], rstd = rstds[row];
    }
    Staged::commit();
    for (; row < rows; row += stride, turn ^= 1) {
        W next_mean = 0, next_rstd = 0, plain = 0, along = 0;
        if (row + stride < rows) {
            Staged::fetch(ROW(g, row + stride), 0, turn ^ 1, lane);
            Staged::fetch(ROW(x, row + stride), 1, turn ^ 1, lane);
            Staged::fetch(ROW(before, row + stride), 2, turn ^ 1, lane);
            next_mean = means[row + stride], next_rstd = rstds[row + stride];
        }
        Staged::commit();
        Staged::wait();
        OVER {
            if (HERE(s)) {
                Sixteen<T> gs = Staged::part(ROW(g, row), 0, turn, s, lane);
                Sixteen<T> xs = Staged::part(ROW(x, row), 1, turn, s, lane);
                W scale[PACK];
                if (weight) read<PACK>(weight + AT(s), scale);
                EACH {
                    W slope = wide(gs.v[k]), normal = (wide(xs.v[k]) - mean) * rstd;
                    scales[s][k] += slope * normal;
                    shifts[s][k] += slope;
                    if (weight) slope *= scale[k];
                    plain += slope;
                    along += slope * normal;
                }
            }
        }
        if (out) {
            row_sums(plain, along);
            plain /= WIDTH;
            along /= WIDTH;
            OVER {
                if (HERE(s)) {
                    Sixteen<T> gs = Staged::part(ROW(g, row), 0, turn, s, lane), bs;
                    Sixteen<T> xs = Staged::part(ROW(x, row), 1, turn, s, lane);
                    if (before) bs = Staged::part(ROW(before, row), 2, turn, s, lane);
                    W scale[PACK], result[PACK];
                    if (weight) read<PACK>(weight + AT(s), scale);
                    EACH {
                        W slope = wide(gs.v[k]), normal = (wide(xs.v[k]) - mean) * rstd;
                        if (weight) slope *= scale[k];
                        result[k] = (slope - plain - normal * along) * rstd;
                        if (before) result[k] += wide(bs.v[k]);
                    }
                    write<PACK>(out + row * WIDTH + AT(s), result);
                }
            }
        }
        mean = next_mean, rstd = next_rstd;
    }
    if (!partial) return;
    add_groups(scales, partial + blockIdx.x * 2LL * WIDTH);
    add_groups(shifts, partial + (blockIdx.x * 2LL + 1) * WIDTH);
}

// Adds the sums of all blocks: grid (columns / 32, 2), block (32, 8). Either result may be null.
extern "C" __global__ void norm_finish(const W* partial, O* scales, O* shifts, i64 blocks, i64 add_scales,
                                       i64 add_shifts) {
    __shared__ W parts[8][32];
    O* out = blockIdx.y ? shifts : scales;
    int column = blockIdx.x * 32 + threadIdx.x;
    if (!out) return;
    W sum = 0;
    if (column < WIDTH) {
        #pragma unroll 8
        for (i64 i = threadIdx.y; i < blocks; i += 8) sum += partial[(i * 2 + blockIdx.y) * WIDTH + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= WIDTH) return;
    W total = 0;
    for (int i = 0; i < 8; i++) total += parts[i][threadIdx.x];
    bool add = blockIdx.y ? add_shifts : add_scales;
    out[column] = As<O>::of(add ? total + (W)wide(out[column]) : total);
}
