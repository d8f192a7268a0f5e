// Sums over the arrays of W ranks that one process holds: W sources in the order of ranks, written to all targets.
//
// T: stored type; A: type of the arithmetic; W: ranks. Which elements, the caller says; nothing waits in here.

struct Arrays {
    T* source[W];
    T* target[W];  // null: not written
};

template <class N> __device__ __forceinline__ bool is_nan(N x) { return x != x; }

extern "C" __global__ void combine(const Arrays arrays, i64 start, i64 stop, i64 maximum) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = start + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < stop; i += step) {
        T made = arrays.source[0][i];
        if (W > 1) {
            A sum = WIDENED(made);
            #pragma unroll
            for (int k = 1; k < W; k++) {
                const A x = WIDENED(arrays.source[k][i]);
                sum = !maximum ? sum + x : is_nan(sum) ? sum : is_nan(x) ? x : sum > x ? sum : x;  // NaN stays
            }
            made = NARROWED(sum);
        }
        #pragma unroll
        for (int k = 0; k < W; k++)
            if (arrays.target[k]) arrays.target[k][i] = made;
    }
}
