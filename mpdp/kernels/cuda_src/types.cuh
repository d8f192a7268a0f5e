// What every kernel here starts with: names of numbers, conversions, packs of four, sums over threads.
//
// There is no #include in these sources: NVRTC then needs no CUDA headers on the user's machine.
// All indices are 64-bit. Sums run in a fixed order, so equal inputs give equal bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// -- conversions: arithmetic runs in float or double, whatever is stored ------------------------------------

__device__ __forceinline__ float wide(f16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}
__device__ __forceinline__ float wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }

template <class T> struct As;
template <> struct As<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
    static __device__ __forceinline__ float of(double x) { return (float)x; }
};
template <> struct As<double> {
    static __device__ __forceinline__ double of(float x) { return x; }
    static __device__ __forceinline__ double of(double x) { return x; }
};
template <> struct As<f16> {
    static __device__ __forceinline__ f16 of(float x) {
        f16 out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
        return out;
    }
    static __device__ __forceinline__ f16 of(double x) {
        f16 out;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(out.bits) : "d"(x));
        return out;
    }
};
template <> struct As<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
#if __CUDA_ARCH__ >= 800
        bf16 out;  // one instruction in place of six
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
        return out;
#else
        u32 bits = __float_as_uint(x);
        if (x == x) bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
        else bits |= 0x400000;                            // NaN stays NaN when its low half goes
        return bf16{(u16)(bits >> 16)};
#endif
    }
    static __device__ __forceinline__ bf16 of(double x) { return of((float)x); }
};

__device__ __forceinline__ double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000LL); }
__device__ __forceinline__ float not_a_number(float) { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ double infinity(double) { return __longlong_as_double(0x7ff0000000000000LL); }
__device__ __forceinline__ float infinity(float) { return __uint_as_float(0x7f800000u); }

// -- packs: one load for four neighbours, where their address allows it -------------------------------------

template <class T> struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four { T v[4]; };

template <class T> __device__ __forceinline__ bool packed(const T* p) {
    return ((u64)p & (alignof(Four<T>) - 1)) == 0;
}

// -- sixteen bytes of T, or as many elements of another type A ------------------------------------------------

template <class T> struct alignas(16) Sixteen { T v[16 / sizeof(T)]; };

// Reads N elements at p, an address of N * sizeof(A) bytes, at most 16 of them at once.
template <int N, class A, class W> __device__ __forceinline__ void read(const A* p, W* to) {
    constexpr int most = 16 / sizeof(A) < N ? 16 / sizeof(A) : N;
    struct alignas(most * sizeof(A)) Part { A v[most]; };
    #pragma unroll
    for (int i = 0; i < N; i += most) {
        Part part = *(const Part*)(p + i);
        #pragma unroll
        for (int k = 0; k < most; k++) to[i + k] = wide(part.v[k]);
    }
}

template <int N, class A, class W> __device__ __forceinline__ void write(A* p, const W* from) {
    constexpr int most = 16 / sizeof(A) < N ? 16 / sizeof(A) : N;
    struct alignas(most * sizeof(A)) Part { A v[most]; };
    #pragma unroll
    for (int i = 0; i < N; i += most) {
        Part part;
        #pragma unroll
        for (int k = 0; k < most; k++) part.v[k] = As<A>::of(from[i + k]);
        *(Part*)(p + i) = part;
    }
}

__device__ __forceinline__ i64 thread() { return blockIdx.x * (i64)blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 threads() { return gridDim.x * (i64)blockDim.x; }

// -- a number that is known at launch, or one (or one a block of 256 elements) in device memory ------------

#define NUMBER(name) double name, const double* name##_at, i64 name##_stride
#define VALUE(name, block) (name##_at ? name##_at[name##_stride * (block)] : name)
#define INTEGER(name) i64 name, const i64* name##_at
#define INTEGER_VALUE(name) (name##_at ? *name##_at : name)

// -- sums over the threads of a warp and of a block, always in the same order -------------------------------

template <class W> __device__ __forceinline__ W warp_sum(W value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Every thread of the block gets the sum; blockDim.x is a multiple of 32.
template <class W> __device__ __forceinline__ W block_sum(W value) {
    __shared__ W parts[32];
    value = warp_sum(value);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __syncthreads();  // an earlier call may still be read
    if (threadIdx.x % 32 == 0) parts[warp] = value;
    __syncthreads();
    W total = 0;
    for (int i = 0; i < warps; i++) total += parts[i];
    return total;
}
