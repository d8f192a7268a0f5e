// Work on rows of a matrix (rows, width). T: stored type; P: of a layer norm's weight and bias; W: type of sums;
// LANES: threads a row, 32 or 256.
// With 32, a block of 256 threads holds eight rows and needs no barrier.

__device__ __forceinline__ i64 my_row() {
    return LANES == 32 ? blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32 : (i64)blockIdx.x;
}
__device__ __forceinline__ int my_lane() { return LANES == 32 ? threadIdx.x % 32 : threadIdx.x; }

__device__ __forceinline__ W row_sum(W value) { return LANES == 32 ? warp_sum(value) : block_sum(value); }

// Every kernel has two bodies: one reads N = 4 neighbours at once, for rows of a multiple of four at addresses that
// allow it, and one goes by single elements, N = 1.

#define ALONG for (i64 i = N * (i64)my_lane(); i < width; i += N * LANES)
#define EACH _Pragma("unroll") for (int k = 0; k < N; k++)
#define BODY template <int N> __device__ __forceinline__ void
#define RUN(body, whole, ...)                            \
    i64 row = my_row();                                  \
    if (row >= rows) return;                             \
    if (width % 4 == 0 && (whole)) body<4>(__VA_ARGS__); \
    else body<1>(__VA_ARGS__);
#define AT(p) (p + row * width)

template <int N, class A = T> struct Some {
    W v[N];
    __device__ __forceinline__ Some() {}
    __device__ __forceinline__ Some(const A* from, i64 i) {
        if (N == 4) {
            Four<A> four = *(const Four<A>*)(from + i);
            #pragma unroll
            for (int k = 0; k < N; k++) v[k] = wide(four.v[k]);
        } else {
            v[0] = wide(from[i]);
        }
    }
    __device__ __forceinline__ void write(T* to, i64 i) const {
        if (N == 4) {
            Four<T> four;
            #pragma unroll
            for (int k = 0; k < N; k++) four.v[k] = As<T>::of(v[k]);
            *(Four<T>*)(to + i) = four;
        } else {
            to[i] = As<T>::of(v[0]);
        }
    }
};

// A 16-bit result does not see the rounding of the fast exponential (2 units in the last place of float32).
__device__ __forceinline__ W power(W x) { return sizeof(T) == 2 ? (W)__expf((float)x) : exp(x); }

// The running maximum of a row and the sum of exp(x - maximum), one reading of the row.
struct Peak {
    W top, sum;
    template <int N> __device__ __forceinline__ void add(const Some<N>& x) {
        W high = x.v[0];
        #pragma unroll
        for (int k = 1; k < N; k++) high = x.v[k] > high || high != high ? x.v[k] : high;
        if (high > top) {
            sum *= power(top - high);
            top = high;
        }
        #pragma unroll
        for (int k = 0; k < N; k++) {
            if (top > -infinity(top)) sum += power(x.v[k] - top);
            else if (x.v[k] != top) sum = x.v[k];  // NaN
        }
    }
    __device__ __forceinline__ void join(W other_top, W other_sum) {
        W high = top > other_top ? top : other_top;
        W a = top == high ? sum : sum * power(top - high);
        W b = other_top == high ? other_sum : other_sum * power(other_top - high);
        top = high;
        sum = a + b;
    }
};

template <int N> __device__ __forceinline__ Peak row_peak(const T* x, i64 width) {
    Peak peak{-infinity((W)0), 0};
    ALONG peak.add(Some<N>(x, i));
    for (int offset = 16; offset; offset >>= 1) {
        W top = __shfl_xor_sync(0xffffffffu, peak.top, offset), sum = __shfl_xor_sync(0xffffffffu, peak.sum, offset);
        peak.join(top, sum);  // symmetric, so all lanes hold equal bits
    }
    if (LANES > 32) {
        __shared__ W tops[32], sums[32];
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            tops[threadIdx.x / 32] = peak.top;
            sums[threadIdx.x / 32] = peak.sum;
        }
        __syncthreads();
        peak = Peak{tops[0], sums[0]};
        for (int i = 1; i < LANES / 32; i++) peak.join(tops[i], sums[i]);
    }
    return peak;
}

// -- softmax ------------------------------------------------------------------------------------------------

BODY softmax_row(const T* x, T* out, i64 width) {
    Peak peak = row_peak<N>(x, width);
    ALONG {
        Some<N> y(x, i);
        EACH y.v[k] = power(y.v[k] - peak.top) / peak.sum;
        y.write(out, i);
    }
}

extern "C" __global__ void softmax(const T* x, T* out, i64 rows, i64 width) {
    RUN(softmax_row, packed(x) && packed(out), AT(x), AT(out), width)
}

BODY softmax_backward_row(const T* g, const T* y, T* out, i64 width) {
    W total = 0;
    ALONG {
        Some<N> a(g, i), b(y, i);
        EACH total += a.v[k] * b.v[k];
    }
    total = row_sum(total);
    ALONG {
        Some<N> a(g, i), b(y, i);
        EACH a.v[k] = b.v[k] * (a.v[k] - total);
        a.write(out, i);
    }
}

extern "C" __global__ void softmax_backward(const T* g, const T* y, T* out, i64 rows, i64 width) {
    RUN(softmax_backward_row, packed(g) && packed(y) && packed(out), AT(g), AT(y), AT(out), width)
}

BODY log_softmax_row(const T* x, T* out, i64 width) {
    Peak peak = row_peak<N>(x, width);
    W norm = log(peak.sum);
    ALONG {
        Some<N> y(x, i);
        EACH y.v[k] = y.v[k] - peak.top - norm;
        y.write(out, i);
    }
}

extern "C" __global__ void log_softmax(const T* x, T* out, i64 rows, i64 width) {
    RUN(log_softmax_row, packed(x) && packed(out), AT(x), AT(out), width)
}

BODY log_softmax_backward_row(const T* g, const T* y, T* out, i64 width) {
    W total = 0;
    ALONG {
        Some<N> a(g, i);
        EACH total += a.v[k];
    }
    total = row_sum(total);
    ALONG {
        Some<N> a(g, i), b(y, i);
        EACH a.v[k] = a.v[k] - power(b.v[k]) * total;
        a.write(out, i);
    }
}

extern "C" __global__ void log_softmax_backward(const T* g, const T* y, T* out, i64 rows, i64 width) {
    RUN(log_softmax_backward_row, packed(g) && packed(y) && packed(out), AT(g), AT(y), AT(out), width)
}

// -- layer norm ---------------------------------------------------------------------------------------------

BODY layer_norm_row(W eps, const T* x, const P* weight, const P* bias, T* out, W* mean, W* rstd, i64 width) {
    W sum = 0, squares = 0;
    ALONG {
        Some<N> a(x, i);
        EACH sum += a.v[k];
    }
    W center = row_sum(sum) / width;
    ALONG {
        Some<N> a(x, i);
        EACH squares += (a.v[k] - center) * (a.v[k] - center);
    }
    W scale = 1 / sqrt(row_sum(squares) / width + eps);
    if (my_lane() == 0) *mean = center, *rstd = scale;
    ALONG {
        Some<N> a(x, i);
        EACH a.v[k] = (a.v[k] - center) * scale;
        if (weight) {
            Some<N, P> w(weight, i);
            EACH a.v[k] *= w.v[k];
        }
        if (bias) {
            Some<N, P> b(bias, i);
            EACH a.v[k] += b.v[k];
        }
        a.write(out, i);
    }
}

extern "C" __global__ void layer_norm(double eps, const T* x, const P* weight, const P* bias, T* out, W* mean,
                                      W* rstd, i64 rows, i64 width) {
    RUN(layer_norm_row, packed(x) && packed(weight) && packed(bias) && packed(out), (W)eps, AT(x), weight, bias,
        AT(out), mean + row, rstd + row, width)
}

BODY layer_norm_backward_row(const T* g, const T* x, const P* weight, W center, W scale, T* out, i64 width) {
    W plain = 0, beside = 0;
    ALONG {
        Some<N> h(g, i), a(x, i);
        if (weight) {
            Some<N, P> w(weight, i);
            EACH h.v[k] *= w.v[k];
        }
        EACH {
            plain += h.v[k];
            beside += h.v[k] * ((a.v[k] - center) * scale);
        }
    }
    plain = row_sum(plain) / width;
    beside = row_sum(beside) / width;
    ALONG {
        Some<N> h(g, i), a(x, i);
        if (weight) {
            Some<N, P> w(weight, i);
            EACH h.v[k] *= w.v[k];
        }
        EACH h.v[k] = (h.v[k] - plain - (a.v[k] - center) * scale * beside) * scale;
        h.write(out, i);
    }
}

extern "C" __global__ void layer_norm_backward(const T* g, const T* x, const P* weight, const W* mean,
                                               const W* rstd, T* out, i64 rows, i64 width) {
    RUN(layer_norm_backward_row, packed(g) && packed(x) && packed(weight) && packed(out), AT(g), AT(x), weight,
        mean[row], rstd[row], AT(out), width)
}

// -- cross entropy ------------------------------------------------------------------------------------------
// A target outside 0..width-1 that is not to be ignored makes its row NaN: nothing is learnt from it in
// silence. INDEX: type of the targets.

BODY cross_entropy_row(const T* x, i64 label, i64 ignore, W* top, W* sum, W* loss, i64 width) {
    Peak peak = row_peak<N>(x, width);
    if (my_lane() != 0) return;
    *top = peak.top, *sum = peak.sum;
    if (label == ignore) *loss = 0;
    else if (label < 0 || label >= width) *loss = not_a_number((W)0);
    else *loss = log(peak.sum) - (wide(x[label]) - peak.top);
}

extern "C" __global__ void cross_entropy(const T* x, const INDEX* target, i64 ignore, W* tops, W* sums, W* losses,
                                         i64 rows, i64 width) {
    RUN(cross_entropy_row, packed(x), AT(x), (i64)target[row], ignore, tops + row, sums + row, losses + row, width)
}

BODY cross_entropy_backward_row(W seed, const T* x, i64 label, i64 ignore, W top, W sum, T* out, i64 width) {
    W scale = label != ignore && (label < 0 || label >= width) ? not_a_number((W)0) : seed / sum;
    ALONG {
        Some<N> y;
        if (label == ignore) {
            EACH y.v[k] = 0;
        } else {
            y = Some<N>(x, i);
            EACH {
                y.v[k] = power(y.v[k] - top) * scale;
                if (i + k == label) y.v[k] -= seed;
            }
        }
        y.write(out, i);
    }
}

extern "C" __global__ void cross_entropy_backward(const W* g, const T* x, const INDEX* target, i64 ignore,
                                                  const W* tops, const W* sums, T* out, i64 rows, i64 width) {
    RUN(cross_entropy_backward_row, packed(x) && packed(out), *g, AT(x), (i64)target[row], ignore, tops[row],
        sums[row], AT(out), width)
}
