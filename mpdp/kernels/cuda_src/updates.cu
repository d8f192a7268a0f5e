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

__device__ __forceinline__ S cut(S x, S limit) { return x > limit ? limit : x < -limit ? -limit : x; }

extern "C" __global__ void sgd(P* weights, C* copy, const G* gradient, S* velocity, i64 n, NUMBER(scale),
                               NUMBER(lr), NUMBER(momentum), NUMBER(decay), i64 decays, i64 nesterov, double limit,
                               i64 limits, const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(copy) && packed(gradient) && packed(velocity);
    fours(together, n, [=](i64 i, int count, bool whole) {
        i64 block = i / BLOCK;
        double scale_here = VALUE(scale, block), lr_here = VALUE(lr, block);
        if (!velocity && !decays && !limits) lr_here *= scale_here, scale_here = 1;
        S factor = (S)scale_here, rate = (S)lr_here, mu = (S)VALUE(momentum, block), wd = (S)VALUE(decay, block);
        S p[4], d[4], v[4];
        read(weights, i, count, whole, p);
        read(gradient, i, count, whole, d);
        if (velocity) read(velocity, i, count, whole, v);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            d[k] = d[k] * factor;
            if (limits) d[k] = cut(d[k], (S)limit);
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
                                NUMBER(shrink), i64 shrinks, double limit, i64 limits, const i64* when) {
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
            if (limits) d[k] = cut(d[k], (S)limit);
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

extern "C" __global__ void lion(P* weights, C* copy, const G* gradient, S* momentum, i64 n, NUMBER(scale), NUMBER(lr),
                                double beta1, double beta2, NUMBER(shrink), i64 shrinks, double limit, i64 limits,
                                const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(copy) && packed(gradient) && packed(momentum);
    S keep1 = (S)beta1, keep2 = (S)beta2, rest1 = (S)(1 - beta1), rest2 = (S)(1 - beta2);
    fours(together, n, [=](i64 i, int count, bool whole) {
        i64 block = i / BLOCK;
        S factor = (S)VALUE(scale, block), rate = (S)VALUE(lr, block), rest = (S)VALUE(shrink, block);
        S p[4], d[4], m[4];
        read(weights, i, count, whole, p);
        read(gradient, i, count, whole, d);
        read(momentum, i, count, whole, m);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            d[k] = d[k] * factor;
            if (limits) d[k] = cut(d[k], (S)limit);
            if (shrinks) p[k] = p[k] * rest;
            S c = m[k] * keep1 + d[k] * rest1;
            p[k] = p[k] - (c > 0 ? (S)1 : c < 0 ? (S)-1 : c == 0 ? (S)0 : c) * rate;  // NaN stays NaN
            m[k] = m[k] * keep2 + d[k] * rest2;
        }
        write(weights, i, count, whole, p);
        if (copy) write(copy, i, count, whole, p);
        write(momentum, i, count, whole, m);
    });
}

// -- LAMB: u of one element, from its moments

struct Steps { S correction, floor, decay; bool decays; };

__device__ __forceinline__ S lamb_step(S p, S m, S v, Steps s) {
    S u = m / (sqrt(v) + s.floor) * s.correction;
    return s.decays ? u + p * s.decay : u;
}

// The moments of one piece, and its sums of squares: a block a piece, so a sum depends on the piece's elements alone.
// An edge is a multiple of 256.
extern "C" __global__ void lamb_moments(const P* weights, const G* gradient, S* mean, S* variance, const i64* edges,
                                        i64 offset, double* out, NUMBER(scale), NUMBER(correction), NUMBER(eps),
                                        double beta1, double beta2, NUMBER(decay), i64 decays, double limit,
                                        i64 limits, const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(gradient) && packed(mean) && packed(variance);
    S keep1 = (S)beta1, keep2 = (S)beta2, rest1 = (S)(1 - beta1), rest2 = (S)(1 - beta2);
    i64 first = edges[blockIdx.x] - offset, last = edges[blockIdx.x + 1] - offset;
    double own = 0, step = 0;
    for (i64 i = first + 4 * threadIdx.x; i < last; i += 4 * blockDim.x) {
        i64 block = i / BLOCK;
        S factor = (S)VALUE(scale, block);
        Steps s = {(S)VALUE(correction, block), (S)VALUE(eps, block), (S)VALUE(decay, block), decays != 0};
        S p[4], d[4], m[4], v[4];
        read(weights, i, 4, together, p);
        read(gradient, i, 4, together, d);
        read(mean, i, 4, together, m);
        read(variance, i, 4, together, v);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            d[k] = d[k] * factor;
            if (limits) d[k] = cut(d[k], (S)limit);
            m[k] = m[k] * keep1 + d[k] * rest1;
            v[k] = v[k] * keep2 + d[k] * d[k] * rest2;
            double x = p[k], u = lamb_step(p[k], m[k], v[k], s);
            own += x * x;
            step += u * u;
        }
        write(mean, i, 4, together, m);
        write(variance, i, 4, together, v);
    }
    own = block_sum(own);
    step = block_sum(step);
    if (threadIdx.x == 0) out[2 * blockIdx.x] = own, out[2 * blockIdx.x + 1] = step;
}

extern "C" __global__ void lamb(P* weights, C* copy, const S* mean, const S* variance, i64 n, NUMBER(lr),
                                const double* ratios, const int* owners, NUMBER(correction), NUMBER(eps),
                                NUMBER(decay), i64 decays, const i64* when) {
    if (when && !*when) return;
    bool together = packed(weights) && packed(copy) && packed(mean) && packed(variance);
    fours(together, n, [=](i64 i, int count, bool whole) {
        i64 block = i / BLOCK;
        S rate = (S)(VALUE(lr, block) * ratios[owners[block]]);
        Steps s = {(S)VALUE(correction, block), (S)VALUE(eps, block), (S)VALUE(decay, block), decays != 0};
        S p[4], m[4], v[4];
        read(weights, i, count, whole, p);
        read(mean, i, count, whole, m);
        read(variance, i, count, whole, v);
        #pragma unroll
        for (int k = 0; k < 4; k++) p[k] = p[k] - lamb_step(p[k], m[k], v[k], s) * rate;
        write(weights, i, count, whole, p);
        if (copy) write(copy, i, count, whole, p);
    });
}

extern "C" __global__ void average(S* average, const P* weights, i64 n, double decay, const i64* when) {
    if (when && !*when) return;
    bool together = packed(average) && packed(weights);
    S keep = (S)decay, rest = (S)(1 - decay);
    fours(together, n, [=](i64 i, int count, bool whole) {
        S e[4], p[4];
        read(average, i, count, whole, e);
        read(weights, i, count, whole, p);
        #pragma unroll
        for (int k = 0; k < 4; k++) e[k] = e[k] * keep + p[k] * rest;
        write(average, i, count, whole, e);
    });
}
