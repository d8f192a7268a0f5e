// out = a @ b (+ bias, ReLU, + out) of float32, for products too small to fill a GPU by tiles of the result alone.
//
// The SPLIT blocks of a cluster take one tile of BM x BN and a slice of the inner length each; their parts are added
// through each other's shared memory, in the order of the slices: no second kernel, and the same bits each time.
// ALONG_A, ALONG_B 1: neighbours in memory are neighbours along the inner length. PACKED_A, PACKED_B 1: addresses,
// strides and lengths are multiples of four floats. A thread computes TM x TN elements.

#define BK 32
#define ACROSS (BN / TN)
#define THREADS (ACROSS * (BM / TM))

// Where four neighbouring rows of depth k lie in a tile of shared memory: moved about so that neither writing along k
// nor reading along rows meets one bank twice.
template <int ROWS> __device__ __forceinline__ int place(int k, int row) {
    return k * ROWS + (row ^ (4 * (k / 4 % ((ROWS < 32 ? ROWS : 32) / 4))));
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

// What a thread carries from one operand's memory to shared memory.
template <int ROWS, int ALONG, int PACKED> struct Carried {
    static constexpr int COUNT = (ROWS * BK / 4 + THREADS - 1) / THREADS;
    Four<float> parts[COUNT];

    __device__ __forceinline__ static void where(int part, int& k, int& row) {
        int i = threadIdx.x + part * THREADS;
        if (ALONG) row = i / (BK / 4), k = i % (BK / 4) * 4;
        else k = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
    }

    __device__ __forceinline__ void fetch(const float* x, int stride, int row0, int rows, int k0, int end) {
        #pragma unroll
        for (int p = 0; p < COUNT; p++) {
            int k, row;
            where(p, k, row);
            k += k0, row += row0;
            int left = k < end && row < rows ? (ALONG ? end - k : rows - row) : 0;
            const float* at = x + (ALONG ? (i64)row * stride + k : (i64)k * stride + row);
            if (PACKED) {  // then all four are there or none
                parts[p] = four_if(left > 0, at);
            } else {
                #pragma unroll
                for (int j = 0; j < 4; j++) parts[p].v[j] = one_if(j < left, at + j);
            }
        }
    }

    __device__ __forceinline__ void put(float* tile) const {
        #pragma unroll
        for (int p = 0; p < COUNT; p++) {
            int k, row;
            where(p, k, row);
            if (COUNT * THREADS != ROWS * BK / 4 && (ALONG ? row >= ROWS : k >= BK)) continue;
            if (ALONG) {
                #pragma unroll
                for (int j = 0; j < 4; j++) tile[place<ROWS>(k + j, row)] = parts[p].v[j];
            } else {
                *(Four<float>*)(tile + place<ROWS>(k, row)) = parts[p];
            }
        }
    }
};

template <int N> struct alignas(4 * N) Some { float v[N]; };

__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 out;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(out) : "l"(p));
    return out;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void finish(float* out, float value, const float* bias, int column, i64 accumulate) {
    if (bias) value += bias[column];
    if (RELU) value = value < 0 ? 0.0f : value;  // NaN stays
    *out = accumulate ? value + *out : value;
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(1, 1, SPLIT)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS)
small_product(const float* a, const float* b, float* out, const float* bias, i64 rows, i64 columns, i64 inner,
              i64 stride_a, i64 stride_b, i64 slice, i64 accumulate) {
    __shared__ alignas(16) float memory[2][BK * (BM + BN)];
    int row0 = blockIdx.y * BM, column0 = blockIdx.x * BN;
    int start = blockIdx.z * (int)slice, end = start + (int)slice < (int)inner ? start + (int)slice : (int)inner;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;  // a warp takes 4 x 8 threads' elements
    int across = warp % (ACROSS / 8) * 8 + lane % 8, down = warp / (ACROSS / 8) * 4 + lane / 8;

    Carried<BM, ALONG_A, PACKED_A> left;
    Carried<BN, ALONG_B, PACKED_B> right;
    float sums[TM][TN] = {};
    left.fetch(a, (int)stride_a, row0, (int)rows, start, end);
    right.fetch(b, (int)stride_b, column0, (int)columns, start, end);
    int turn = 0;
    for (int k0 = start; k0 < end; k0 += BK, turn ^= 1) {
        float *tile_a = memory[turn], *tile_b = memory[turn] + BK * BM;
        left.put(tile_a);
        right.put(tile_b);
        __syncthreads();
        if (k0 + BK < end) {
            left.fetch(a, (int)stride_a, row0, (int)rows, k0 + BK, end);
            right.fetch(b, (int)stride_b, column0, (int)columns, k0 + BK, end);
        }
        int depth = end - k0 < BK ? end - k0 : BK;
        #pragma unroll 2
        for (int k4 = 0; k4 < depth; k4 += 4) {  // what lies behind the end is 0
            #pragma unroll
            for (int k = k4; k < k4 + 4; k++) {
                Some<TM> x = *(const Some<TM>*)(tile_a + place<BM>(k, down * TM));
                Some<TN> y = *(const Some<TN>*)(tile_b + place<BN>(k, across * TN));
                #pragma unroll
                for (int i = 0; i < TM; i++) {
                    #pragma unroll
                    for (int j = 0; j < TN; j++) sums[i][j] += x.v[i] * y.v[j];
                }
            }
        }
    }
#if SPLIT > 1
    __syncthreads();
    float* tile = memory[0];
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        #pragma unroll
        for (int j = 0; j < TN; j++) tile[(down * TM + i) * BN + across * TN + j] = sums[i][j];
    }
    cluster_barrier();
    u32 own = shared_address(tile);
    for (int i = threadIdx.x; i < BM * BN / SPLIT; i += THREADS) {
        int at = blockIdx.z * (BM * BN / SPLIT) + i, row = row0 + at / BN, column = column0 + at % BN;
        if (row >= rows || column >= columns) continue;
        float parts[SPLIT], total = 0;
        #pragma unroll
        for (int s = 0; s < SPLIT; s++) {
            u32 there;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own + 4 * at), "r"(s));
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(parts[s]) : "r"(there));
        }
        #pragma unroll
        for (int s = 0; s < SPLIT; s++) total += parts[s];
        finish(out + (i64)row * columns + column, total, bias, column, accumulate);
    }
    cluster_barrier();  // the others may still read
#else
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        int row = row0 + down * TM + i;
        #pragma unroll
        for (int j = 0; j < TN; j++) {
            int column = column0 + across * TN + j;
            if (row < rows && column < columns)
                finish(out + (i64)row * columns + column, sums[i][j], bias, column, accumulate);
        }
    }
#endif
}
