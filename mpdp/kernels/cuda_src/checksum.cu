// The checksum of kernels.updates, in the same integers: words are mixed with keys by place, summed a hash block
// of WORDS words, and the blocks' sums are folded in order. All arithmetic is modulo 2^64, so no order matters
// within a block.

#define WORDS 8192
#define MIX 0x9E3779B97F4A7C15ULL

// The last block holds the tail: the bytes behind the last whole word, with zeros behind them.
extern "C" __global__ void hash_blocks(const u8* data, const u64* keys, u64* sums, i64 bytes) {
    i64 words = bytes / 8, blocks = (words + WORDS - 1) / WORDS, first = blockIdx.x * (i64)WORDS;
    u64 sum = 0;
    if (blockIdx.x < blocks) {
        for (i64 i = threadIdx.x; i < WORDS && first + i < words; i += blockDim.x) {
            u64 key = keys[i], mixed = (((const u64*)data)[first + i] ^ key) * MIX;
            sum += (mixed ^ (mixed >> 32)) * key;
        }
    } else if (threadIdx.x == 0) {
        u64 word = 0, key = keys[0];
        for (i64 i = words * 8; i < bytes; i++) word |= (u64)data[i] << (8 * (i - words * 8));
        u64 mixed = (word ^ key) * MIX;
        sum = (mixed ^ (mixed >> 32)) * key;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void hash_fold(const u64* sums, u64* out, i64 blocks, i64 bytes) {
    __shared__ u64 near[1024];
    u64 total = (u64)bytes;
    for (i64 first = 0; first < blocks; first += 1024) {
        __syncthreads();
        if (first + threadIdx.x < blocks) near[threadIdx.x] = sums[first + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) {
            i64 count = blocks - first < 1024 ? blocks - first : 1024;
            for (i64 i = 0; i < count; i++) {
                total = total * MIX + near[i];
                total ^= total >> 29;
            }
        }
    }
    if (threadIdx.x == 0) *out = total >> 1;
}
