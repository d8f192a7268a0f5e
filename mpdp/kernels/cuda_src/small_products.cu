// out = a @ b (+ bias, ReLU, + out) of float32, for products too small to fill a GPU by tiles of the result alone.
//
// A tile of BM x BN is one block's, or that of the SPLIT blocks of a cluster, which take a slice of the inner length
// each. Inside a block GROUPS groups of warps share the inner length again: so there are enough warps to hide what a
// load takes. Parts are added through shared memory, of groups and then of blocks, always in this order: no second
// kernel, and the same bits each time.
//
// Tensor cores multiply numbers of 11 bits (TF32). A float32 is the sum of two, but for its last two bits or so:
// x = high + low, and x y = high high + (high low + low high), the rest being below 2^-22 of it. That is three products
// in place of one, and as exact as a sum of float32 is: what comes here has sums of hundreds. Tensor cores cut what
// they add, so they add eight numbers at most, and the rest is rounded sums of float32. Infinity becomes NaN.
//
// ALONG 1: neighbours in memory are neighbours along the inner length. PACKED 1: addresses, strides and lengths are
// multiples of four floats.

#define BK 64
#define WM (BM < 32 ? BM : 32)  // a warp's tile, of 16 x 8 that a tensor core takes at once
#define WN (BN < 32 ? BN : 32)
#define ACROSS (BN / WN)  // warps
#define GROUP (32 * ACROSS * (BM / WM))
#define THREADS (GROUP * GROUPS)
#define STRIDE (BN + 8)  // of a part in shared memory
#define LOADED (BK * (BM + BN + 16))
#define PARTS (GROUPS * BM * STRIDE)
#define MEMORY (LOADED > PARTS ? LOADED : PARTS)  // floats of shared memory

// Where four neighbouring rows of depth k lie in a tile of shared memory: moved about so that neither writing along k
// or along rows nor reading what a tensor core wants meets one bank twice.
template <int ROWS> __device__ __forceinline__ int place(int k, int row) {
    return k * (ROWS + 8) + (row ^ (4 * (k / 4 % ((ROWS < 32 ? ROWS : 32) / 4))));
}

struct Parted { u32 high, low; };

__device__ __forceinline__ Parted parted(float x) {
    Parted out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out.high) : "f"(x));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out.low) : "f"(x - __uint_as_float(out.high)));
    return out;
}

// sums (16 x 8) += a (16 x 8) b (8 x 8)
__device__ __forceinline__ void add_product(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads under a condition, 0 otherwise: without a branch, which would wait for each of them.
__device__ __forceinline__ Four<float> four_if(bool ok, const float* at) {
    Four<float> out;
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; mov.f32 %2, 0f00000000;"
        " mov.f32 %3, 0f00000000; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
        : "=&f"(out.v[0]), "=&f"(out.v[1]), "=&f"(out.v[2]), "=&f"(out.v[3]) : "l"(at), "r"((int)ok));
    return out;
}

__device__ __forceinline__ float one_if(bool ok, const float* at) {
    float out;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.f32 %0, [%1]; }"
                 : "=&f"(out) : "l"(at), "r"((int)ok));
    return out;
}

// What a thread carries from one operand's memory to shared memory. With a mask of the same layout, elements count
// where the mask is above 0.
template <int ROWS, int ALONG, int PACKED> struct Carried {
    static constexpr int COUNT = (ROWS * BK / 4 + THREADS - 1) / THREADS;
    Four<float> parts[COUNT], masks[COUNT];

    __device__ __forceinline__ static void where(int part, int& k, int& row) {
        int i = threadIdx.x + part * THREADS;
        if (ALONG) row = i / (BK / 4), k = i % (BK / 4) * 4;
        else k = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
    }

    __device__ __forceinline__ void fetch(const float* x, const float* mask, int stride, int row0, int rows, int k0,
                                          int end) {
        #pragma unroll
        for (int p = 0; p < COUNT; p++) {
            int k, row;
            where(p, k, row);
            bool spare = ALONG ? row >= ROWS : k >= BK;
            k += k0, row += row0;
            int left = !spare && k < end && row < rows ? (ALONG ? end - k : rows - row) : 0;
            i64 at = ALONG ? (i64)row * stride + k : (i64)k * stride + row;
            if (PACKED) {  // then all four are there or none
                parts[p] = four_if(left > 0, x + at);
                if (mask) masks[p] = four_if(left > 0, mask + at);
            } else {
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    parts[p].v[j] = one_if(j < left, x + at + j);
                    if (mask) masks[p].v[j] = one_if(j < left, mask + at + j);
                }
            }
        }
    }

    __device__ __forceinline__ void put(float* tile, bool masked) {
        #pragma unroll
        for (int p = 0; p < COUNT; p++) {
            int k, row;
            where(p, k, row);
            if (COUNT * THREADS != ROWS * BK / 4 && (ALONG ? row >= ROWS : k >= BK)) continue;
            #pragma unroll
            for (int j = 0; j < 4; j++)
                if (masked) parts[p].v[j] *= masks[p].v[j] > 0 ? 1.0f : 0.0f;  // NaN stays
            if (ALONG) {
                #pragma unroll
                for (int j = 0; j < 4; j++) tile[place<ROWS>(k + j, row)] = parts[p].v[j];
            } else {
                *(Four<float>*)(tile + place<ROWS>(k, row)) = parts[p];
            }
        }
    }
};

__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 out;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(out) : "l"(p));
    return out;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// One product, and how it ends.
struct Product {
    const float *a, *mask, *b, *bias;
    float* out;
    int rows, columns, inner, stride_a, stride_b, slice;
    bool relu, accumulate;

    __device__ __forceinline__ void finish(int row, int column, float value) const {
        if (bias) value += bias[column];
        if (relu) value = value < 0 ? 0.0f : value;  // NaN stays
        float* to = out + (i64)row * columns + column;
        *to = accumulate ? value + *to : value;
    }
};

// The tile at (row0, column0) by the calling block, or a cluster of SHARED blocks of which it is number `part`; IN and
// FOURS are ALONG and PACKED of an operand.
template <int SHARED, int IN_A, int IN_B, int FOURS_A, int FOURS_B>
__device__ __forceinline__ void multiply(const Product& p, float* memory, int row0, int column0, int part) {
    int start = part * p.slice, end = start + p.slice < p.inner ? start + p.slice : p.inner;
    int group = threadIdx.x / GROUP, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32;
    int row_of = warp / ACROSS * WM + lane / 4, column_of = warp % ACROSS * WN + lane / 4, depth_of = lane % 4;
    bool masked = p.mask != 0;
    float *tile_a = memory, *tile_b = memory + BK * (BM + 8);

    Carried<BM, IN_A, FOURS_A> left;
    Carried<BN, IN_B, FOURS_B> right;
    float sums[WM / 16][WN / 8][4] = {};
    left.fetch(p.a, p.mask, p.stride_a, row0, p.rows, start, end);
    right.fetch(p.b, 0, p.stride_b, column0, p.columns, start, end);
    for (int k0 = start; k0 < end; k0 += BK) {
        if (k0 > start) __syncthreads();  // others may still read
        left.put(tile_a, masked);
        right.put(tile_b, false);
        __syncthreads();
        if (k0 + BK < end) {
            left.fetch(p.a, p.mask, p.stride_a, row0, p.rows, k0 + BK, end);
            right.fetch(p.b, 0, p.stride_b, column0, p.columns, k0 + BK, end);
        }
        #pragma unroll 1
        for (int step = 0; step < BK / GROUPS; step += 8) {  // not unrolled: a multiprocessor holds two blocks then
            int k = group * (BK / GROUPS) + step;
            if (k0 + k >= end) break;  // what lies behind the end is 0
            k += depth_of;
            Parted x[WM / 16][4];
            #pragma unroll
            for (int i = 0; i < WM / 16; i++) {
                #pragma unroll
                for (int part = 0; part < 4; part++)
                    x[i][part] = parted(tile_a[place<BM>(k + part / 2 * 4, row_of + i * 16 + part % 2 * 8)]);
            }
            #pragma unroll
            for (int j = 0; j < WN / 8; j++) {
                Parted y[2];
                #pragma unroll
                for (int part = 0; part < 2; part++)
                    y[part] = parted(tile_b[place<BN>(k + part * 4, column_of + j * 8)]);
                #pragma unroll
                for (int i = 0; i < WM / 16; i++) {
                    Parted* a = x[i];
                    float some[4] = {};
                    add_product(some, a[0].low, a[1].low, a[2].low, a[3].low, y[0].high, y[1].high);
                    add_product(some, a[0].high, a[1].high, a[2].high, a[3].high, y[0].low, y[1].low);
                    add_product(some, a[0].high, a[1].high, a[2].high, a[3].high, y[0].high, y[1].high);
                    #pragma unroll
                    for (int part = 0; part < 4; part++) sums[i][j][part] += some[part];
                }
            }
        }
    }
    __syncthreads();
    float* own = memory + group * (BM * STRIDE) + row_of * STRIDE + warp % ACROSS * WN + 2 * (lane % 4);
    #pragma unroll
    for (int i = 0; i < WM / 16; i++) {
        #pragma unroll
        for (int j = 0; j < WN / 8; j++) {
            #pragma unroll
            for (int part = 0; part < 4; part++)
                own[(i * 16 + part / 2 * 8) * STRIDE + j * 8 + part % 2] = sums[i][j][part];
        }
    }
    __syncthreads();
    #pragma unroll
    for (int i = threadIdx.x; i < BM * BN; i += THREADS) {
        int at = i / BN * STRIDE + i % BN, row = row0 + i / BN, column = column0 + i % BN;
        float total = memory[at];
        #pragma unroll
        for (int g = 1; g < GROUPS; g++) total += memory[g * (BM * STRIDE) + at];
        if (SHARED > 1) memory[at] = total;
        else if (row < p.rows && column < p.columns) p.finish(row, column, total);
    }
    if (SHARED > 1) {
        cluster_barrier();
        u32 here = shared_address(memory);
        for (int i = threadIdx.x; i < BM * BN / SHARED; i += THREADS) {
            int own = part * (BM * BN / SHARED) + i, row = row0 + own / BN, column = column0 + own % BN;
            int at = own / BN * STRIDE + own % BN;
            if (row >= p.rows || column >= p.columns) continue;
            float parts[SHARED], total = 0;
            #pragma unroll
            for (int s = 0; s < SHARED; s++) {
                u32 there;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here + 4 * at), "r"(s));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(parts[s]) : "r"(there));
            }
            #pragma unroll
            for (int s = 0; s < SHARED; s++) total += parts[s];
            p.finish(row, column, total);
        }
        cluster_barrier();  // the others may still read
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

// Blocks: SPLIT for each tile, tiles of a row after one another.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS)
small_product(const float* a, const float* b, float* out, const float* bias, i64 rows, i64 columns, i64 inner,
              i64 stride_a, i64 stride_b, i64 slice, i64 accumulate) {
    __shared__ __align__(16) float memory[MEMORY];
    int tile = blockIdx.x / SPLIT, wide = (columns + BN - 1) / BN;
    Product p = {a, 0, b, bias, out, (int)rows, (int)columns, (int)inner, (int)stride_a, (int)stride_b, (int)slice,
                 RELU != 0, accumulate != 0};
    multiply<SPLIT, ALONG_A, ALONG_B, PACKED_A, PACKED_B>(p, memory, tile / wide * BM, tile % wide * BN,
                                                          blockIdx.x % SPLIT);
}

// What backward of a linear layer computes, each where it is wanted, from the gradient g (rows, outputs) after the
// activation, where it counts: of x (rows, inputs) g @ weight, by SPLIT blocks for each of `tiles_x` tiles; of the
// weight (outputs, inputs) g.T @ x, a block a tile; and of the bias the sums of g over rows, a block for 32 columns.
// kept: the layer's output, with RELU 1. PACKED_A, PACKED_B: of g and `kept`; of x and weight.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS)
small_linear_backward(const float* g, const float* kept, const float* x, const float* weight, float* out_x,
                      float* out_weight, float* out_bias, i64 rows, i64 outputs, i64 inputs, i64 slice, i64 tiles_x,
                      i64 tiles_weight, i64 add_x, i64 add_weight, i64 add_bias) {
    __shared__ __align__(16) float memory[MEMORY];
    int o = (int)outputs, i = (int)inputs, n = (int)rows, wide = (i + BN - 1) / BN;
    int tile = blockIdx.x / SPLIT;
    if (tile < tiles_x) {
        Product p = {g, kept, weight, 0, out_x, n, i, o, o, i, (int)slice, false, add_x != 0};
        multiply<SPLIT, 1, 0, PACKED_A, PACKED_B>(p, memory, tile / wide * BM, tile % wide * BN, blockIdx.x % SPLIT);
        return;
    }
    tile = blockIdx.x - (int)tiles_x * SPLIT;
    if (tile < tiles_weight) {
        Product p = {g, kept, x, 0, out_weight, o, i, n, o, i, n, false, add_weight != 0};
        multiply<1, 0, 0, PACKED_A, PACKED_B>(p, memory, tile / wide * BM, tile % wide * BN, 0);
        return;
    }
    if (!out_bias) return;  // clusters are whole, so a few blocks may have nothing to do
    int column = (tile - (int)tiles_weight) * 32 + threadIdx.x % 32;
    float sum = 0;
    if (column < o) {
        #pragma unroll 4
        for (int row = threadIdx.x / 32; row < n; row += THREADS / 32) {
            float value = g[(i64)row * o + column];
            sum += kept ? value * (kept[(i64)row * o + column] > 0 ? 1.0f : 0.0f) : value;
        }
    }
    memory[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= o) return;
    sum = 0;
    for (int k = threadIdx.x; k < THREADS; k += 32) sum += memory[k];
    out_bias[column] = add_bias ? sum + out_bias[column] : sum;
}
