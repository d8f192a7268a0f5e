// Functions of one element. T: stored type; W: type of the arithmetic.

template <class F> __device__ __forceinline__ void map(const T* x, T* out, i64 n, F f) {
    i64 start = 0;
    if (packed(x) && packed(out)) {
        for (i64 i = thread(); i < n / 4; i += threads()) {
            Four<T> a = ((const Four<T>*)x)[i], r;
            #pragma unroll
            for (int k = 0; k < 4; k++) r.v[k] = As<T>::of(f((W)wide(a.v[k])));
            ((Four<T>*)out)[i] = r;
        }
        start = n / 4 * 4;
    }
    for (i64 i = start + thread(); i < n; i += threads()) out[i] = As<T>::of(f((W)wide(x[i])));
}

template <class F> __device__ __forceinline__ void map(const T* x, const T* y, T* out, i64 n, F f) {
    i64 start = 0;
    if (packed(x) && packed(y) && packed(out)) {
        for (i64 i = thread(); i < n / 4; i += threads()) {
            Four<T> a = ((const Four<T>*)x)[i], b = ((const Four<T>*)y)[i], r;
            #pragma unroll
            for (int k = 0; k < 4; k++) r.v[k] = As<T>::of(f((W)wide(a.v[k]), (W)wide(b.v[k])));
            ((Four<T>*)out)[i] = r;
        }
        start = n / 4 * 4;
    }
    for (i64 i = start + thread(); i < n; i += threads()) out[i] = As<T>::of(f((W)wide(x[i]), (W)wide(y[i])));
}

extern "C" __global__ void sum(const T* x, const T* y, T* out, i64 n) {
    map(x, y, out, n, [](W a, W b) { return a + b; });
}

extern "C" __global__ void relu(const T* x, T* out, i64 n) {
    map(x, out, n, [](W a) { return a < 0 ? (W)0 : a; });  // NaN stays
}

extern "C" __global__ void relu_backward(const T* g, const T* y, T* out, i64 n) {
    map(g, y, out, n, [](W a, W b) { return (b > 0 ? (W)1 : (W)0) * a; });
}

extern "C" __global__ void sigmoid(const T* x, T* out, i64 n) {
    map(x, out, n, [](W a) {
        W small = exp(-fabs(a)), below = small / (1 + small);
        return a >= 0 ? 1 - below : below;
    });
}

extern "C" __global__ void sigmoid_backward(const T* g, const T* y, T* out, i64 n) {
    map(g, y, out, n, [](W a, W b) { return (1 - b) * b * a; });
}

extern "C" __global__ void tanh_backward(const T* g, const T* y, T* out, i64 n) {
    map(g, y, out, n, [](W a, W b) { return (1 - b * b) * a; });
}

#define ROOT ((W)0.79788456080286535588)  // sqrt(2 / pi)
#define CUBE ((W)0.044715)

extern "C" __global__ void gelu(const T* x, T* out, i64 n) {
    map(x, out, n, [](W a) {
        W t = tanh((a * a * CUBE + 1) * a * ROOT);
        return (t + 1) * a * (W)0.5;
    });
}

extern "C" __global__ void gelu_backward(const T* g, const T* x, T* out, i64 n) {
    map(g, x, out, n, [](W a, W b) {
        W t = tanh((b * b * CUBE + 1) * b * ROOT);
        W slope = (b * b * (3 * CUBE * ROOT) + ROOT) * b * (1 - t) + 1;
        return slope * (t + 1) * (W)0.5 * a;
    });
}

// Products, not a choice, as NumPy does it: an infinite element that is dropped gives NaN in both.
extern "C" __global__ void dropout(const T* x, const u8* mask, T* out, i64 n, double scale) {
    W keep = (W)scale;
    i64 start = 0;
    if (packed(x) && packed(mask) && packed(out)) {
        for (i64 i = thread(); i < n / 4; i += threads()) {
            Four<T> a = ((const Four<T>*)x)[i], r;
            Four<u8> m = ((const Four<u8>*)mask)[i];
            #pragma unroll
            for (int k = 0; k < 4; k++) r.v[k] = As<T>::of((m.v[k] ? keep : (W)0) * (W)wide(a.v[k]));
            ((Four<T>*)out)[i] = r;
        }
        start = n / 4 * 4;
    }
    for (i64 i = start + thread(); i < n; i += threads())
        out[i] = As<T>::of((mask[i] ? keep : (W)0) * (W)wide(x[i]));
}

extern "C" __global__ void squared_error_backward(const W* g, const T* x, const T* y, T* out, i64 n) {
    W factor = 2 * *g;
    map(x, y, out, n, [factor](W a, W b) { return (a - b) * factor; });
}

// *flag is 1 before the launch and 0 after it if an element is NaN or infinite.
extern "C" __global__ void all_finite(const T* x, u8* flag, i64 n) {
    bool bad = false;
    i64 start = 0;
    if (packed(x)) {
        for (i64 i = thread(); i < n / 4; i += threads()) {
            Four<T> a = ((const Four<T>*)x)[i];
            #pragma unroll
            for (int k = 0; k < 4; k++) bad |= !(fabs(wide(a.v[k])) < infinity(wide(a.v[k])));
        }
        start = n / 4 * 4;
    }
    for (i64 i = start + thread(); i < n; i += threads()) bad |= !(fabs(wide(x[i])) < infinity(wide(x[i])));
    if (bad) *flag = 0;
}
