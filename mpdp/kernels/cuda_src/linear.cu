// What surrounds the product of a linear layer: bias and activation after it, and their gradients.
// T: stored type; W: type of the arithmetic; O: type of sums; N: neighbours that a thread takes at once.
// ACTIVATION: 0 none, 1 ReLU, 2 GELU (tanh form).

#define ROOT ((W)0.79788456080286535588)  // sqrt(2 / pi)
#define CUBE ((W)0.044715)

struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Pack { T v[N]; };

// 16-bit results need no more than seven digits, and tanh() itself would take longer than the memory.
__device__ __forceinline__ W hyperbolic(W u) {
    if (sizeof(T) == 2) return 1 - __fdividef(2.0f, __expf(2 * (float)u) + 1);
    return tanh(u);
}

__device__ __forceinline__ W activate(W a) {
    if (ACTIVATION == 1) return a < 0 ? (W)0 : a;  // NaN stays
    if (ACTIVATION == 2) return (hyperbolic((a * a * CUBE + 1) * a * ROOT) + 1) * a * (W)0.5;
    return a;
}

// Of g, where `kept` is the result of ReLU or what GELU was applied to.
__device__ __forceinline__ W deactivate(W g, W kept) {
    if (ACTIVATION == 1) return (kept > 0 ? (W)1 : (W)0) * g;
    if (ACTIVATION == 2) {
        W t = hyperbolic((kept * kept * CUBE + 1) * kept * ROOT);
        return ((kept * kept * (3 * CUBE * ROOT) + ROOT) * kept * (1 - t) + 1) * (t + 1) * (W)0.5 * g;
    }
    return g;
}

// out = activation(pre + bias) over `count` packs of N, a row's width being a multiple of N; pre + bias is written
// back where `keep` is not 0.
extern "C" __global__ void bias_activation(T* pre, const T* bias, T* out, i64 count, i64 packs, i64 keep) {
    for (i64 i = thread(); i < count; i += threads()) {
        Pack a = ((const Pack*)pre)[i], b, r;
        if (bias) b = ((const Pack*)bias)[i % packs];
        #pragma unroll
        for (int k = 0; k < N; k++) {
            W sum = wide(a.v[k]);
            if (bias) sum += wide(b.v[k]);
            a.v[k] = As<T>::of(sum);
            r.v[k] = As<T>::of(activate(sum));
        }
        if (keep) ((Pack*)pre)[i] = a;
        ((Pack*)out)[i] = r;
    }
}

#ifdef TALL
// The gradient before the activation (where there is one), and its sums over rows (where `partial` or `sums`).
// Block (ACROSS, TALL) takes up to `chunk` rows of ACROSS packs; one chunk alone writes the sums at once. Sums are
// taken of what is written, rounded to T: the same numbers that the products of backward read.
extern "C" __global__ void activation_backward(const T* g, const T* kept, T* out, W* partial, O* sums, i64 rows,
                                               i64 width, i64 chunk, i64 accumulate) {
    __shared__ W parts[TALL][ACROSS * N];
    i64 pack = blockIdx.x * (i64)ACROSS + threadIdx.x, packs = width / N;
    i64 first = blockIdx.y * chunk, last = first + chunk < rows ? first + chunk : rows;
    W total[N] = {};
    if (pack < packs) {
        #pragma unroll 4
        for (i64 row = first + threadIdx.y; row < last; row += TALL) {
            i64 at = row * packs + pack;
            Pack a = ((const Pack*)g)[at];
            if (ACTIVATION) {
                Pack b = ((const Pack*)kept)[at];
                #pragma unroll
                for (int k = 0; k < N; k++) a.v[k] = As<T>::of(deactivate(wide(a.v[k]), wide(b.v[k])));
                ((Pack*)out)[at] = a;
            }
            #pragma unroll
            for (int k = 0; k < N; k++) total[k] += wide(a.v[k]);
        }
    }
    if (!sums) return;
    #pragma unroll
    for (int k = 0; k < N; k++) parts[threadIdx.y][threadIdx.x * N + k] = total[k];
    __syncthreads();
    for (int i = threadIdx.y * ACROSS + threadIdx.x; i < ACROSS * N; i += ACROSS * TALL) {
        i64 column = blockIdx.x * (i64)(ACROSS * N) + i;
        if (column >= width) continue;
        W sum = 0;
        #pragma unroll
        for (int j = 0; j < TALL; j++) sum += parts[j][i];
        if (gridDim.y > 1) partial[blockIdx.y * width + column] = sum;
        else sums[column] = As<O>::of(accumulate ? sum + (W)wide(sums[column]) : sum);
    }
}

// Block (32, 8) adds the chunks of 32 columns.
extern "C" __global__ void finish_sums(const W* partial, O* sums, i64 chunks, i64 width, i64 accumulate) {
    __shared__ W parts[8][32];
    i64 column = blockIdx.x * 32LL + threadIdx.x;
    W sum = 0;
    if (column < width) {
        #pragma unroll 8
        for (i64 i = threadIdx.y; i < chunks; i += 8) sum += partial[i * width + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
    W total = 0;
    for (int i = 0; i < 8; i++) total += parts[i][threadIdx.x];
    sums[column] = As<O>::of(accumulate ? total + (W)wide(sums[column]) : total);
}
#endif
