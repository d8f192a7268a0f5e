// float64 sums over spans of a flat array, and over all of one. T: stored type; O: type of a total.
// A span's sum depends on its elements alone, never on where they lie: threads take elements by their place in
// the span, and their sums are added in a fixed order.

#define SPAN_LOOP                                                              \
    i64 first = blockIdx.x * span, last = first + span < n ? first + span : n; \
    for (i64 i = first + threadIdx.x; i < last; i += blockDim.x)

extern "C" __global__ void span_squares(const T* x, double* out, i64 n, i64 span) {
    double sum = 0;
    SPAN_LOOP {
        double value = wide(x[i]);
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void span_sums(const T* x, double* out, i64 n, i64 span) {
    double sum = 0;
    SPAN_LOOP sum += (double)wide(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void span_differences(const T* x, const T* y, double* out, i64 n, i64 span) {
    double sum = 0;
    SPAN_LOOP {
        double value = wide(x[i]) - wide(y[i]);  // rounded to T's arithmetic, as NumPy does
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// One block adds everything.
extern "C" __global__ void total(const T* x, O* out, i64 n) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += (double)wide(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = As<O>::of(sum);
}

// LAMB: a block a parameter adds up the sums of its pieces, two a piece, in a fixed order.
extern "C" __global__ void trust_ratios(const double* sums, const i64* spans, double* out) {
    double own = 0, step = 0;
    for (i64 i = spans[2 * blockIdx.x] + threadIdx.x; i < spans[2 * blockIdx.x + 1]; i += blockDim.x)
        own += sums[2 * i], step += sums[2 * i + 1];
    own = block_sum(own);
    step = block_sum(step);
    if (threadIdx.x == 0) out[blockIdx.x] = own > 0 && step > 0 ? sqrt(own) / sqrt(step) : 1;
}
