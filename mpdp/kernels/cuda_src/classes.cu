// Cross entropy over many classes: a block a row of (rows, width), 16 bytes at a time. T: stored type, of at most 32
// bits; W: float; INDEX: type of the targets; COUNT: threads of a block. Probabilities are nowhere in memory.

#define PACK ((int)(16 / sizeof(T)))
#define AHEAD 4  // packs that a thread reads before it works on the first
#define EACH _Pragma("unroll") for (int k = 0; k < PACK; k++)
#define OVER _Pragma("unroll") for (int s = 0; s < AHEAD; s++)

__device__ __forceinline__ void join(W& top, W& sum, W other_top, W other_sum) {
    W high = top > other_top ? top : other_top;
    W a = top == high ? sum : sum * __expf(top - high);
    W b = other_top == high ? other_sum : other_sum * __expf(other_top - high);
    top = high;
    sum = a + b;
}

// The maximum of each row, the sum of exp(x - maximum), and -log softmax(x)[target]: 0 for `ignore`, NaN for a target
// that is no class.
extern "C" __global__ void __launch_bounds__(COUNT)
    classes_loss(const T* logits, const INDEX* target, i64 ignore, W* tops, W* sums, W* losses, i64 width) {
    i64 row = blockIdx.x, packs = width / PACK;
    const Sixteen<T>* x = (const Sixteen<T>*)(logits + row * width);
    W top = -infinity((W)0), sum = 0;
    for (i64 start = threadIdx.x; start < packs; start += AHEAD * COUNT) {
        Sixteen<T> ahead[AHEAD];
        OVER {
            if (start + s * COUNT < packs) ahead[s] = x[start + s * COUNT];
        }
        OVER {
            if (start + s * COUNT < packs) {
                W v[PACK], high = top;
                EACH {
                    v[k] = wide(ahead[s].v[k]);
                    high = v[k] > high ? v[k] : high;
                }
                if (high > top) sum *= __expf(top - high), top = high;
                if (top > -infinity((W)0)) {
                    EACH sum += __expf(v[k] - top);  // NaN where one of them is
                } else {
                    EACH sum += v[k] != v[k] ? v[k] : 0;
                }
            }
        }
    }
    for (int offset = 16; offset; offset >>= 1) {
        W t = __shfl_xor_sync(0xffffffffu, top, offset), u = __shfl_xor_sync(0xffffffffu, sum, offset);
        join(top, sum, t, u);  // symmetric, so all lanes hold equal bits
    }
    __shared__ W all[2][COUNT / 32];
    if (threadIdx.x % 32 == 0) all[0][threadIdx.x / 32] = top, all[1][threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < COUNT / 32; i++) join(top, sum, all[0][i], all[1][i]);
    i64 label = (i64)target[row];
    tops[row] = top;
    sums[row] = sum;
    if (label == ignore) losses[row] = 0;
    else if (label < 0 || label >= width) losses[row] = not_a_number((W)0);
    else losses[row] = logf(sum) - (wide(logits[row * width + label]) - top);
}

// out = *g * (softmax(logits) - onehot(target)), rows of `ignore` zero; out may be the logits.
extern "C" __global__ void __launch_bounds__(COUNT)
    classes_loss_backward(const W* g, const T* logits, const INDEX* target, i64 ignore, const W* tops, const W* sums,
                          T* out, i64 width) {
    i64 row = blockIdx.x, packs = width / PACK, label = (i64)target[row];
    const Sixteen<T>* x = (const Sixteen<T>*)(logits + row * width);
    Sixteen<T>* y = (Sixteen<T>*)(out + row * width);
    bool ignored = label == ignore;
    W seed = *g, top = tops[row], scale = seed / sums[row];
    if (!ignored && (label < 0 || label >= width)) scale = not_a_number((W)0);
    for (i64 start = threadIdx.x; start < packs; start += AHEAD * COUNT) {
        Sixteen<T> ahead[AHEAD];
        OVER {
            if (start + s * COUNT < packs) ahead[s] = x[start + s * COUNT];
        }
        OVER {
            i64 i = start + s * COUNT;
            if (i < packs) {
                i64 at = label - i * PACK;
                EACH {
                    W p = __expf(wide(ahead[s].v[k]) - top) * scale;
                    if (at == k) p -= seed;
                    ahead[s].v[k] = As<T>::of(ignored ? (W)0 : p);
                }
                y[i] = ahead[s];
            }
        }
    }
}
