// Sums over the rows of a matrix (rows, width). T: stored type; W: type of sums; O: type of the result.
// NORMAL 1: each element is multiplied by the normalised x, which gives layer norm's weight gradient.

#define TALL 8  // threads that share a column

// Block (32, TALL) sums up to `chunk` rows of 32 columns; one chunk alone writes the result at once.
extern "C" __global__ void column_sums(const T* g, const T* x, const W* mean, const W* rstd, W* partial, O* out,
                                       i64 rows, i64 width, i64 chunk, i64 accumulate) {
    __shared__ W parts[TALL][32];
    i64 column = blockIdx.x * 32LL + threadIdx.x;
    i64 first = blockIdx.y * chunk, last = first + chunk < rows ? first + chunk : rows;
    W sum = 0;
    if (column < width) {
        #pragma unroll 4
        for (i64 row = first + threadIdx.y; row < last; row += TALL) {
            W value = wide(g[row * width + column]);
            if (NORMAL) value *= (wide(x[row * width + column]) - mean[row]) * rstd[row];
            sum += value;
        }
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
    W total = 0;
    for (int i = 0; i < TALL; i++) total += parts[i][threadIdx.x];
    if (gridDim.y > 1) partial[blockIdx.y * width + column] = total;
    else out[column] = As<O>::of(accumulate ? total + (W)wide(out[column]) : total);
}

extern "C" __global__ void column_sums_finish(const W* partial, O* out, i64 chunks, i64 width, i64 accumulate) {
    i64 column = thread();
    if (column >= width) return;
    W total = 0;
    #pragma unroll 4
    for (i64 i = 0; i < chunks; i++) total += partial[i * width + column];
    out[column] = As<O>::of(accumulate ? total + (W)wide(out[column]) : total);
}
