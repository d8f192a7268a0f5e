// Loads and stores whose order other GPUs and processes see, and sums that keep subnormal numbers.

__device__ __forceinline__ void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// CuPy compiles with -ftz=true, which these forms ignore.
__device__ __forceinline__ float plus(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
__device__ __forceinline__ bool above(float a, float b) {
    u32 result;
    asm("{.reg .pred p; setp.gt.f32 p, %1, %2; selp.u32 %0, 1, 0, p;}" : "=r"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
