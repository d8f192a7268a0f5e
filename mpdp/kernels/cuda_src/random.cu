// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), the same words as kernels.random.

__device__ __forceinline__ void philox(u32* c, u32 k0, u32 k1) {
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
        u32 high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// One thread four elements of one sample: element e takes word e % 4 of counter (e / 4, position, step).
extern "C" __global__ void keep_mask(u8* out, i64 key0, i64 key1, INTEGER(step), INTEGER(start), i64 count,
                                     i64 elements, i64 threshold) {
    i64 blocks = (elements + 3) / 4, i = thread();
    if (i >= count * blocks) return;
    i64 sample = i / blocks, block = i - sample * blocks;
    u64 position = (u64)(INTEGER_VALUE(start) + sample);
    u32 c[4] = {(u32)block, (u32)position, (u32)(position >> 32), (u32)INTEGER_VALUE(step)};
    philox(c, (u32)key0, (u32)key1);
    u8* to = out + sample * elements + 4 * block;
    Four<u8> keep;
    #pragma unroll
    for (int k = 0; k < 4; k++) keep.v[k] = c[k] >= (u32)threshold;
    if (elements % 4 == 0) {
        *(Four<u8>*)to = keep;
    } else {
        for (int k = 0; k < 4 && 4 * block + k < elements; k++) to[k] = keep.v[k];
    }
}
