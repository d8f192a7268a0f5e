// The optimizers' rules over flat ranges. P: type of the weights; C: of their working copy, which is written where
// `copy` is not null; G: of the gradient; S: of the state and of the arithmetic. Built without fused multiply-add,
// and in NumPy's order: the results have NumPy's bits (but for numbers below 1e-38, which CuPy's compiler options
// flush to zero).

#define BLOCK 256  // elements that share one value of a column

// A thread works on four neighbours, which lie in one block.
template <class F> __device__ __forceinline__ void fours(bool together, i64 n, F f) {
    i64 first = 4 * thread();
    if (first >= n) return;
    if (together && first + 4 <= n) f(first, 4, true);
    else f(first, n - first < 4 ? (int)(n - first) : 4, false);
}

template <class A> __device__ __forceinline__ void read(const A* from, i64 i, int count, bool whole, S* into) {
    if (whole) {
        Four<A> four = *(const Four<A>*)(from + i);
        #pragma unroll
        for (int k = 0; k < 4; k++) into[k] = (S)wide(four.v[k]);
    } else {
        for (int k = 0; k < count; k++) into[k] = (S)wide(from[i + k]);
    }
}

template <class A> __device__ __forceinline__ void write(A* to, i64 i, int count, bool whole, const S* from) {
    if (whole) {
        Four<A> four;
        #pragma unroll
        for (int k = 0; k < 4; k++) four.v[k] = As<A>::of(from[k]);
        *(Four<A>*)(to + i) = four;
    } else {
        for (int k = 0; k < count; k++) to[i + k] = As<A>::of(from[k]);
    }
}

extern "C" __global__ void sgd(P* weights, C* copy, const G* gradient, S* velocity, i64 n, NUMBER(scale),
                               NUMBER(lr), NUMBER(momentum), NUMBER(decay), i64 decays, i64 nesterov,
                               const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(copy) && packed(gradient) && packed(velocity);
    fours(together, n, [=](i64 i, int count, bool whole) {
        i64 block = i / BLOCK;
        double scale_here = VALUE(scale, block), lr_here = VALUE(lr, block);
        if (!velocity && !decays) lr_here *= scale_here, scale_here = 1;
        S factor = (S)scale_here, rate = (S)lr_here, mu = (S)VALUE(momentum, block), wd = (S)VALUE(decay, block);
        S p[4], d[4], v[4];
        read(weights, i, count, whole, p);
        read(gradient, i, count, whole, d);
        if (velocity) read(velocity, i, count, whole, v);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            d[k] = d[k] * factor;
            if (decays) d[k] = d[k] + p[k] * wd;
            if (velocity) {
                v[k] = v[k] * mu + d[k];
                d[k] = nesterov ? d[k] + v[k] * mu : v[k];
            }
            p[k] = p[k] - d[k] * rate;
        }
        write(weights, i, count, whole, p);
        if (copy) write(copy, i, count, whole, p);
        if (velocity) write(velocity, i, count, whole, v);
    });
}

extern "C" __global__ void adam(P* weights, C* copy, const G* gradient, S* mean, S* variance, i64 n, NUMBER(scale),
                                NUMBER(step), NUMBER(eps), double beta1, double beta2, NUMBER(decay), i64 decays,
                                NUMBER(shrink), i64 shrinks, const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(copy) && packed(gradient) && packed(mean) && packed(variance);
    S keep1 = (S)beta1, keep2 = (S)beta2, rest1 = (S)(1 - beta1), rest2 = (S)(1 - beta2);
    fours(together, n, [=](i64 i, int count, bool whole) {
        i64 block = i / BLOCK;
        S factor = (S)VALUE(scale, block), rate = (S)VALUE(step, block), floor = (S)VALUE(eps, block);
        S wd = (S)VALUE(decay, block), rest = (S)VALUE(shrink, block);
        S p[4], d[4], m[4], v[4];
        read(weights, i, count, whole, p);
        read(gradient, i, count, whole, d);
        read(mean, i, count, whole, m);
        read(variance, i, count, whole, v);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            d[k] = d[k] * factor;
            if (decays) d[k] = d[k] + p[k] * wd;
            if (shrinks) p[k] = p[k] * rest;
            m[k] = m[k] * keep1 + d[k] * rest1;
            v[k] = v[k] * keep2 + d[k] * d[k] * rest2;
            p[k] = p[k] - m[k] / (sqrt(v[k]) + floor) * rate;
        }
        write(weights, i, count, whole, p);
        if (copy) write(copy, i, count, whole, p);
        write(mean, i, count, whole, m);
        write(variance, i, count, whole, v);
    });
}
