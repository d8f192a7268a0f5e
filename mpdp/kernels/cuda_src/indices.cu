// Checks of indices, and rows by index. INDEX: type of the indices.

// -- checks -------------------------------------------------------------------------------------------------
// A bad index is written into a record in pinned host memory, which the host reads without asking the device.
// The first record stands until the host takes it.

struct Record { i64 full, site, value, position, limit, inner, axes, step; };

#define NONE 0x7fffffffffffffffLL

__device__ __forceinline__ void block_minimum(i64& value) {
    __shared__ i64 parts[32];
    for (int offset = 16; offset; offset >>= 1) {
        i64 other = __shfl_xor_sync(0xffffffffu, value, offset);
        value = other < value ? other : value;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; i++) value = parts[i] < value ? parts[i] : value;
}

#define WHERE i64 limit, i64 site, i64 inner, i64 axes, INTEGER(step)
#define FINISH(counted, first)                                                                        \
    if (threadIdx.x == 0) {                                                                           \
        *count = (double)counted;                                                                     \
        volatile Record* r = record;                                                                  \
        if (first != NONE && r->full == 0) {                                                          \
            r->site = site, r->value = (i64)index[first], r->position = first, r->limit = limit;      \
            r->inner = inner, r->axes = axes, r->step = INTEGER_VALUE(step);                          \
            __threadfence_system();                                                                   \
            r->full = 1;                                                                              \
        }                                                                                             \
    }

// Counts the indices that are not ignored and finds the first of them that is out of range.
extern "C" __global__ void check(const INDEX* index, i64 n, i64 chunk, i64 ignore, i64 ignoring, double* count,
                                 i64* counts, i64* firsts, Record* record, WHERE) {
    i64 first = NONE, counted = 0;
    i64 start = blockIdx.x * chunk, stop = start + chunk < n ? start + chunk : n;
    for (i64 i = start + threadIdx.x; i < stop; i += blockDim.x) {
        i64 value = (i64)index[i];
        if (ignoring && value == ignore) continue;
        counted++;
        if ((value < 0 || value >= limit) && i < first) first = i;
    }
    counted = block_sum(counted);
    block_minimum(first);
    if (gridDim.x == 1) {
        FINISH(counted, first)
    } else if (threadIdx.x == 0) {
        counts[blockIdx.x] = counted;
        firsts[blockIdx.x] = first;
    }
}

extern "C" __global__ void check_finish(const INDEX* index, i64 chunks, double* count, const i64* counts,
                                        const i64* firsts, Record* record, WHERE) {
    i64 first = NONE, counted = 0;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) {
        counted += counts[i];
        if (firsts[i] < first) first = firsts[i];
    }
    counted = block_sum(counted);
    block_minimum(first);
    FINISH(counted, first)
}

// For few short rows the check, the losses and their sum, in one block of LANES threads a row: W top and sum of
// exp(x - top) of each row of x (n, width) for backward, and the sum of -log softmax(x)[index].
#ifdef LANES
__device__ __forceinline__ void across_warp(i64& count, double& sum, i64& first) {
    for (int offset = 16; offset; offset >>= 1) {
        count += __shfl_xor_sync(0xffffffffu, count, offset);
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        i64 other = __shfl_xor_sync(0xffffffffu, first, offset);
        first = other < first ? other : first;
    }
}

extern "C" __global__ void check_and_loss(const INDEX* index, i64 n, i64 width, i64 ignore, double* count,
                                          Record* record, const T* x, W* tops, W* sums, O* total, WHERE) {
    i64 first = NONE, counted = 0, at_once = blockDim.x / LANES;
    int lane = threadIdx.x % LANES;
    double losses = 0;
    for (i64 start = 0; start < n; start += at_once) {  // all threads of a warp take part in shuffles
        i64 row = start + threadIdx.x / LANES;
        bool here = row < n;
        const T* from = x + row * width;
        i64 label = here && lane == 0 ? (i64)index[row] : ignore;
        W top = -infinity((W)0), sum = 0;
        int lost = 0;  // a maximum does not keep NaN
        if (here) for (i64 c = lane; c < width; c += LANES) {
            W value = wide(from[c]);
            lost |= value != value;
            top = value > top ? value : top;
        }
        for (int offset = LANES / 2; offset; offset >>= 1) {
            W other = __shfl_xor_sync(0xffffffffu, top, offset);
            lost |= __shfl_xor_sync(0xffffffffu, lost, offset);
            top = other > top ? other : top;
        }
        if (lost) top = not_a_number((W)0);
        if (here) for (i64 c = lane; c < width; c += LANES) sum += exp(wide(from[c]) - top);
        for (int offset = LANES / 2; offset; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (!here || lane != 0) continue;
        bool bad = label < 0 || label >= width;
        tops[row] = top, sums[row] = sum;
        if (label == ignore) continue;
        counted++;
        if (bad && row < first) first = row;
        losses += bad ? not_a_number(0.0) : (double)(log(sum) - (wide(from[label]) - top));
    }
    // All three over warps, and then over the block: with one barrier.
    __shared__ i64 counts[32], firsts[32];
    __shared__ double sums_of[32];
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    across_warp(counted, losses, first);
    if (threadIdx.x % 32 == 0) counts[warp] = counted, sums_of[warp] = losses, firsts[warp] = first;
    __syncthreads();
    if (warp) return;
    lane = threadIdx.x;
    counted = lane < warps ? counts[lane] : 0;
    losses = lane < warps ? sums_of[lane] : 0;
    first = lane < warps ? firsts[lane] : NONE;
    across_warp(counted, losses, first);
    if (lane == 0) *total = As<O>::of(losses);
    FINISH(counted, first)
}
#endif

// -- rows ---------------------------------------------------------------------------------------------------

// Block (32, 8) copies eight rows; an index out of range gives NaN.
extern "C" __global__ void gather(const T* table, const INDEX* index, T* out, i64 n, i64 rows, i64 width) {
    i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y;
    if (i >= n) return;
    i64 row = (i64)index[i];
    bool bad = row < 0 || row >= rows;
    for (i64 c = threadIdx.x; c < width; c += 32)
        out[i * width + c] = bad ? As<T>::of(not_a_number((W)0)) : table[row * width + c];
}
