// Loads and stores whose order other GPUs and processes see, and sums that keep subnormal numbers.

__device__ __forceinline__ void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_flag(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_flag(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Write 8 bytes as a line: each half in one word with a number.
__device__ __forceinline__ void store_line(char* line, u64 content, u32 number) {
    asm volatile("{.reg .b32 low, high; .reg .b64 first, second;\n"
                 "mov.b64 {low, high}, %1; mov.b64 first, {low, %2}; mov.b64 second, {high, %2};\n"
                 "st.relaxed.sys.global.v2.b64 [%0], {first, second};}" ::"l"(line), "l"(content), "r"(number) : "memory");
}

// Read a line; whether both words have the number.
__device__ __forceinline__ bool load_line(const char* line, u64& content, u32 number) {
    u32 low, high, one, other;
    asm volatile("{.reg .b64 first, second;\n"
                 "ld.relaxed.sys.global.v2.b64 {first, second}, [%4];\n"
                 "mov.b64 {%0, %1}, first; mov.b64 {%2, %3}, second;}"
                 : "=r"(low), "=r"(one), "=r"(high), "=r"(other) : "l"(line) : "memory");
    content = (u64)high << 32 | low;
    return one == number && other == number;
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
