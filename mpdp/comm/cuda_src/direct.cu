// Collectives over the buffers of W ranks, each of which this process has mapped. One launch is one collective.
//
// T: stored type; A: type of the arithmetic; COPIES 1: parts are copied, 0: summed; W: ranks.
//
// A rank's memory of a lane is shared with the others and holds, from its start: how many pieces of mail each rank has
// sent to it and taken from it (2 x RANKS words), flags and places (BLOCKS x 2 x RANKS words each), then at the
// offsets that Lane names two stages a block, two mailboxes a rank, two slots of lines for each rank and block, and the
// rank's own counters.
//
// The block of one rank meets the blocks of the same index of the other ranks, and no others: blocks of one launch
// never wait for one another, and whichever part of an array a block writes, only its counterparts read. Each meeting
// is a tick; the flag of a tick holds its number and the signature of the call. Flags alternate between two words,
// so that a rank which has passed one meeting and enters the next does not overwrite a flag that is still waited for.

#define RANKS 16                  // room in the tables
#define PLACE_BITS 44             // of an offset in a region
#define ABORT 0                   // words in host memory: set by the host, all kernels end
#define STOPPED 1                 // a kernel has ended for that reason
#define MISMATCH 2                // 1 + the rank that is in another call
#define OWN_CALL 3                // signature of the call that this rank was in then
#define WAITS 16                  // 1 for each rank that this one has been waiting for, 2 if in vain
#define LOOKS_UNTIL_NOTED 131072  // 0.1 s
#define PACK (16 / (i64)sizeof(T))
#define EACH (8 / (i64)sizeof(T))  // elements of a line
#define UNROLL (W <= 2 ? 4 : W <= 4 ? 2 : 1)

struct Lane {
    char* memory[W];  // each rank's, as this process has it mapped
    u32* host;        // words in pinned host memory
    u32* halt;        // the halt latch of this rank, in device memory
    u64* regions;     // addresses of each region, by rank
    i64 rank, blocks, stages, stage_bytes, mails, mail_bytes, lines, line_bytes, counters;
};

struct Call {
    i64 bounds[W + 1];  // elements that rank r makes: bounds[r] to bounds[r + 1]
    char* array;
    i64 count;
    u64 place;               // region and offset of the array; 0 if it lies in none
    i64 keep_from, keep_to;  // elements whose sum this rank needs
    i64 signature;           // call, type and length as 32 bits, equal on all ranks
    i64 maximum;             // instead of the sum
    i64 root;                // the rank whose array is copied, or -1: each gives its own part
    i64 targets;             // bit r: rank r gets what this rank makes
    i64 small;               // 1: one phase through the stages; 2: in lines
};

// -- arithmetic, in the order of ranks -----------------------------------------------------------------------

template <class N> __device__ __forceinline__ N plus(N a, N b) { return a + b; }
template <class N> __device__ __forceinline__ bool above(N a, N b) { return a > b; }

template <class N> __device__ __forceinline__ N combine(N a, N b, bool maximum) {
    if (!maximum) return plus(a, b);
    return a != a ? a : b != b ? b : above(a, b) ? a : b;  // NaN stays
}

__device__ __forceinline__ A widened(T x) { return WIDENED(x); }
__device__ __forceinline__ T narrowed(A x) { return NARROWED(x); }

union Pack {
    uint4 words;
    T v[PACK];
};

template <int FROM, int TO, int COUNT>
__device__ __forceinline__ void move_packs(T* const (&from)[FROM], T* const (&to)[TO], i64 at, i64 step, bool maximum) {
    Pack read[COUNT][FROM];
    #pragma unroll
    for (int c = 0; c < COUNT; c++) {
        #pragma unroll
        for (int k = 0; k < FROM; k++) read[c][k].words = *(const uint4*)(from[k] + at + c * step);
    }
    #pragma unroll
    for (int c = 0; c < COUNT; c++) {
        Pack made = read[c][0];
        if (FROM > 1) {
            #pragma unroll
            for (int i = 0; i < PACK; i++) {
                A sum = widened(made.v[i]);
                #pragma unroll
                for (int k = 1; k < FROM; k++) sum = combine(sum, widened(read[c][k].v[i]), maximum);
                made.v[i] = narrowed(sum);
            }
        }
        #pragma unroll
        for (int k = 0; k < TO; k++)
            if (to[k]) *(uint4*)(to[k] + at + c * step) = made.words;
    }
}

// Write n elements, the sums over `from`, to all `to` that are not null. 16 bytes at a time where the addresses allow.
template <int FROM, int TO>
__device__ __forceinline__ void move(T* const (&from)[FROM], T* const (&to)[TO], i64 n, i64 thread, i64 threads,
                                     bool maximum) {
    const u64 low = (u64)from[0] & 15;
    bool alike = true;
    #pragma unroll
    for (int k = 1; k < FROM; k++) alike = alike && ((u64)from[k] & 15) == low;
    #pragma unroll
    for (int k = 0; k < TO; k++) alike = alike && (!to[k] || ((u64)to[k] & 15) == low);
    i64 head = n, packs = 0;
    if (alike) {
        head = low ? (16 - (i64)low) / (i64)sizeof(T) : 0;
        if (head > n) head = n;
        packs = (n - head) / PACK;
    }
    i64 i = thread;
    for (; i + (UNROLL - 1) * threads < packs; i += UNROLL * threads)
        move_packs<FROM, TO, UNROLL>(from, to, head + i * PACK, threads * PACK, maximum);
    for (; i < packs; i += threads) move_packs<FROM, TO, 1>(from, to, head + i * PACK, 0, maximum);
    const i64 skipped = packs * PACK;
    for (i64 e = thread; e < n - skipped; e += threads) {
        const i64 at = e < head ? e : e + skipped;
        T made = from[0][at];
        if (FROM > 1) {
            A sum = widened(made);
            #pragma unroll
            for (int k = 1; k < FROM; k++) sum = combine(sum, widened(from[k][at]), maximum);
            made = narrowed(sum);
        }
        #pragma unroll
        for (int k = 0; k < TO; k++)
            if (to[k]) to[k][at] = made;
    }
}

__device__ __forceinline__ void copy(T* from, T* to, i64 n) {
    T* const sources[1] = {from};
    T* const targets[1] = {to};
    if (n > 0) move<1, 1>(sources, targets, n, threadIdx.x, blockDim.x, false);
}

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 most(i64 a, i64 b) { return a > b ? a : b; }

// -- waiting -------------------------------------------------------------------------------------------------

// Whether a rank has failed: by the host's word, or by what another kernel of this rank has found.
__device__ bool stopped(const Lane& lane, int peer) {
    if (!load_relaxed(lane.host + ABORT) && !load_relaxed(lane.halt)) return false;
    store_relaxed(lane.halt, 1);
    store_relaxed(lane.host + WAITS + peer, 2);
    store_relaxed(lane.host + STOPPED, 1);
    return true;
}

// ACQUIRE: what its owner wrote before the word is then there too.
template <bool ACQUIRE, class Test>
__device__ bool wait_for(const Lane& lane, const u64* word, int peer, u64& seen, Test there) {
    bool noted = false;
    for (u32 looks = 1; !there(seen = ACQUIRE ? load_acquire(word) : load_flag(word)); looks++) {
        if (looks % 256 == 0 && stopped(lane, peer)) return false;
        if (looks % LOOKS_UNTIL_NOTED == 0 && blockIdx.x == 0) {
            store_relaxed(lane.host + WAITS + peer, 1);
            noted = true;
        }
    }
    if (noted) store_relaxed(lane.host + WAITS + peer, 0);
    return true;
}

__device__ __forceinline__ u64* flags(const Lane& lane, int owner, u32 tick) {
    return (u64*)lane.memory[owner] + 2 * RANKS + (blockIdx.x * 2 + (tick & 1)) * RANKS;
}

// Where the flags lie, the places lie behind them in the same order.
__device__ __forceinline__ u64* places(const Lane& lane, int owner, u32 tick) {
    return flags(lane, owner, tick) + lane.blocks * 2 * RANKS;
}

// Wait for the flag of a peer and compare signatures. False: a rank has failed, or is in another call.
template <bool ACQUIRE> __device__ bool met(const Lane& lane, u32 tick, u32 signature, int peer) {
    u64 seen = 0;
    if (!wait_for<ACQUIRE>(lane, flags(lane, (int)lane.rank, tick) + peer, peer, seen,
                           [tick](u64 flag) { return (u32)(flag >> 32) == tick; }))
        return false;
    if ((u32)seen == signature) return true;
    store_relaxed(lane.host + OWN_CALL, signature);
    store_relaxed(lane.host + MISMATCH, 1 + peer);
    store_relaxed(lane.halt, 1);
    return false;
}

// Meet the blocks of this index of all ranks: what each has written is then read by all. False: a rank has failed.
__device__ bool meet(const Lane& lane, u32& tick, const Call& call, bool with_place) {
    const int rank = (int)lane.rank;
    const u32 signature = (u32)call.signature;
    tick++;
    bool good = true;
    __syncthreads();
    for (int peer = threadIdx.x; peer < W; peer += blockDim.x) {
        if (with_place) places(lane, peer, tick)[rank] = call.place;
        store_release(flags(lane, peer, tick) + rank, (u64)tick << 32 | signature);
    }
    for (int peer = threadIdx.x; peer < W; peer += blockDim.x)
        good = met<true>(lane, tick, signature, peer) && good;
    return __syncthreads_and(good);
}

// -- collectives ---------------------------------------------------------------------------------------------

// Arrays that all ranks have mapped: each rank makes its part in place, for all that need it.
__device__ __forceinline__ void directly(const Lane& lane, const Call& call, T* const* arrays) {
    const int rank = (int)lane.rank;
    const i64 first = call.bounds[rank], count = call.bounds[rank + 1] - first;
    T* to[W];
    #pragma unroll
    for (int k = 0; k < W; k++) {  // each rank begins with another one
        const int target = (rank + k) % W;
        to[k] = call.targets >> target & 1 ? arrays[target] + first : (T*)0;
    }
#if COPIES
    T* const from[1] = {arrays[call.root >= 0 ? call.root : rank] + first};
    move<1, W>(from, to, count, thread(), threads(), false);
#else
    T* from[W];
    #pragma unroll
    for (int k = 0; k < W; k++) from[k] = arrays[k] + first;
    move<W, W>(from, to, count, thread(), threads(), call.maximum);
#endif
}

// The part of [at, at + n) that a rank gives, where parts are copied.
__device__ __forceinline__ void given(const Call& call, int giver, i64 at, i64 n, i64& from, i64& to) {
    const bool all = call.root == giver, none = call.root >= 0 && !all;
    from = most(all ? 0 : call.bounds[giver], at);
    to = none ? from : least(all ? call.count : call.bounds[giver + 1], at + n);
}

// Any arrays: each block moves its share through its stages, which all ranks have mapped, piece by piece. Stages are
// used in turn: when a rank fills one again, the others have met it since they read it.
__device__ __forceinline__ bool in_pieces(const Lane& lane, const Call& call, u32& tick, u32& piece) {
    const int rank = (int)lane.rank;
    T* array = (T*)call.array;
    const i64 share = ((call.count + gridDim.x - 1) / gridDim.x + PACK - 1) / PACK * PACK;
    const i64 first = least(blockIdx.x * share, call.count), last = least(first + share, call.count);
    const i64 step = lane.stage_bytes / (i64)sizeof(T);
    for (i64 at = first; at < last; at += step, piece++) {
        const i64 n = least(step, last - at);
        const i64 offset = lane.stages + ((i64)blockIdx.x * 2 + (piece & 1)) * lane.stage_bytes;
        T* own = (T*)(lane.memory[rank] + offset);
#if COPIES
        i64 from, to;
        given(call, rank, at, n, from, to);
        copy(array + from, own + (from - at), to - from);
        if (!meet(lane, tick, call, false)) return false;
        for (int k = 1; k < W; k++) {
            const int giver = (rank + k) % W;
            given(call, giver, at, n, from, to);
            copy((T*)(lane.memory[giver] + offset) + (from - at), array + from, to - from);
        }
#else
        copy(array + at, own, n);
        if (!meet(lane, tick, call, false)) return false;
        const i64 keep_from = most(call.keep_from - at, 0), keep_to = least(call.keep_to - at, n);
        const i64 slice = ((n + W - 1) / W + PACK - 1) / PACK * PACK;
        const i64 start = call.small ? keep_from : least(rank * slice, n);
        const i64 stop = call.small ? keep_to : least(start + slice, n);
        T* from[W];
        #pragma unroll
        for (int k = 0; k < W; k++) from[k] = (T*)(lane.memory[k] + offset) + start;
        T* const to[1] = {(call.small ? array + at : own) + start};
        if (stop > start) move<W, 1>(from, to, stop - start, threadIdx.x, blockDim.x, call.maximum);
        if (call.small) continue;
        if (!meet(lane, tick, call, false)) return false;
        for (int k = 0; k < W; k++) {
            const int owner = (rank + k) % W;
            const i64 lo = most(least(owner * slice, n), keep_from), hi = least(least((owner + 1) * slice, n), keep_to);
            copy((T*)(lane.memory[owner] + offset) + lo, array + at + lo, hi - lo);
        }
#endif
    }
    return true;
}

// Small sums. A line is two words of 8 bytes, each 4 bytes of content and the number of the meeting, which travel
// together: whoever reads the number has the content. So nothing has to be released or acquired, and each rank writes
// its content into the slots that the others read. A slot is written again two meetings on; its owner has met the
// writer in a later kernel by then.
union Line {
    u64 word;
    T v[EACH];
};

__device__ __forceinline__ Line line_of(const T* from, i64 n) {
    Line line;
    if (n >= EACH && (u64)from % 8 == 0) {
        line.word = *(const u64*)from;
    } else {
        line.word = 0;
        #pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i < n) line.v[i] = from[i];
    }
    return line;
}

#if !COPIES
__device__ __forceinline__ bool in_lines(const Lane& lane, const Call& call, u32& tick, bool halted) {
    const int rank = (int)lane.rank;
    const u32 signature = (u32)call.signature;
    const i64 share = ((call.count + gridDim.x - 1) / gridDim.x + EACH - 1) / EACH * EACH;
    const i64 first = least(blockIdx.x * share, call.count), n = least(share, call.count - first);
    T* array = (T*)call.array + first;
    tick++;
    bool good = !halted;
    const i64 slots = lane.lines + ((i64)blockIdx.x * 2 + (tick & 1)) * W * lane.line_bytes;
    const char* own_slots = lane.memory[rank] + slots;
    for (int peer = blockDim.x - 1 - threadIdx.x; good && peer < W; peer += blockDim.x)
        store_flag(flags(lane, peer, tick) + rank, (u64)tick << 32 | signature);
    for (i64 i = threadIdx.x; good && i * EACH < n; i += blockDim.x) {
        const Line own = line_of(array + i * EACH, n - i * EACH);
        #pragma unroll
        for (int k = 0; k < W; k++)
            if (k != rank) store_line(lane.memory[k] + slots + rank * lane.line_bytes + i * 16, own.word, tick);
    }
    // The last threads look at the flags, while the first wait for content.
    for (int peer = blockDim.x - 1 - threadIdx.x; peer < W; peer += blockDim.x)
        good = good && met<false>(lane, tick, signature, peer);
    for (i64 i = threadIdx.x; good && i * EACH < n; i += blockDim.x) {
        Line lines[W];
        u32 missing = 1;
        for (u32 looks = 1; missing && good; looks++) {
            missing = 0;
            #pragma unroll
            for (int k = 0; k < W; k++)
                if (k != rank && !load_line(own_slots + k * lane.line_bytes + i * 16, lines[k].word, tick)) missing = 1 + k;
            if (missing && looks % 256 == 0) good = !stopped(lane, missing - 1);
        }
        if (!good) break;
        T* at = array + i * EACH;
        const Line own = line_of(at, n - i * EACH);
        Line made;
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
            A sum = widened(rank ? lines[0].v[e] : own.v[e]);
            #pragma unroll
            for (int k = 1; k < W; k++) sum = combine(sum, widened(k == rank ? own.v[e] : lines[k].v[e]), call.maximum);
            made.v[e] = W > 1 ? narrowed(sum) : own.v[e];
        }
        const i64 lo = call.keep_from - first - i * EACH, hi = least(call.keep_to - first, n) - i * EACH;
        if (lo <= 0 && hi >= EACH && (u64)at % 8 == 0) {
            *(u64*)at = made.word;
        } else {
            #pragma unroll
            for (int e = 0; e < EACH; e++)
                if (e >= lo && e < hi) at[e] = made.v[e];
        }
    }
    return __syncthreads_and(good);
}
#endif

extern "C" __global__ void __launch_bounds__(512) collective(GIVEN Lane lane, GIVEN Call call) {
    __shared__ T* arrays[W];
    const int rank = (int)lane.rank;
    u32* counters = (u32*)(lane.memory[rank] + lane.counters) + 4 * RANKS + 2 * blockIdx.x;
    u32 tick = counters[0], piece = counters[1];
    const bool halted = load_relaxed(lane.halt);
#if !COPIES
    if (call.small == 2) {
        if (in_lines(lane, call, tick, halted) && threadIdx.x == 0) counters[0] = tick;
        return;
    }
#endif
    if (__syncthreads_or(halted)) return;
    if (call.small) {
        if (!in_pieces(lane, call, tick, piece)) return;
    } else {
        if (!meet(lane, tick, call, true)) return;
        bool mapped = true;
        for (int peer = threadIdx.x; peer < W; peer += blockDim.x) {
            const u64 place = places(lane, rank, tick)[peer];
            const u64 base = place ? lane.regions[(place >> PLACE_BITS) * W + peer] : 0;
            arrays[peer] = (T*)(base + (place & ((1ull << PLACE_BITS) - 1)));
            mapped = mapped && place != 0;
        }
        if (__syncthreads_and(mapped)) {
            directly(lane, call, arrays);
            if (!meet(lane, tick, call, false)) return;
        } else if (!in_pieces(lane, call, tick, piece)) {
            return;
        }
    }
    if (threadIdx.x == 0) {
        counters[0] = tick;
        counters[1] = piece;
    }
}

// -- between two ranks, in the build for bytes ---------------------------------------------------------------

#if COPIES
extern "C" __global__ void __launch_bounds__(512) send_mail(GIVEN Lane lane, char* array, i64 bytes, i64 to) {
    const int rank = (int)lane.rank, peer = (int)to;
    u64* sent = (u64*)(lane.memory[rank] + lane.counters) + peer;
    u64 number = *sent;
    if (__syncthreads_or(load_relaxed(lane.halt))) return;
    for (i64 at = 0; at < bytes; at += lane.mail_bytes, number++) {
        bool good = true;
        if (threadIdx.x == 0 && number >= 2) {  // the box is free when all but one piece before have been taken
            const u64 least_taken = number - 1;
            u64 seen = 0;
            good = wait_for<true>(lane, (u64*)lane.memory[rank] + RANKS + peer, peer, seen,
                                  [least_taken](u64 taken) { return taken >= least_taken; });
        }
        if (!__syncthreads_and(good)) return;
        char* box = lane.memory[peer] + lane.mails + (rank * 2 + (i64)(number & 1)) * lane.mail_bytes;
        copy((T*)(array + at), (T*)box, least(lane.mail_bytes, bytes - at));
        __syncthreads();
        if (threadIdx.x == 0) store_release((u64*)lane.memory[peer] + rank, number + 1);
    }
    if (threadIdx.x == 0) *sent = number;
}

extern "C" __global__ void __launch_bounds__(512) receive_mail(GIVEN Lane lane, char* array, i64 bytes, i64 source) {
    const int rank = (int)lane.rank, peer = (int)source;
    u64* received = (u64*)(lane.memory[rank] + lane.counters) + RANKS + peer;
    u64 number = *received;
    if (__syncthreads_or(load_relaxed(lane.halt))) return;
    for (i64 at = 0; at < bytes; at += lane.mail_bytes, number++) {
        bool good = true;
        if (threadIdx.x == 0) {
            const u64 before = number;
            u64 seen = 0;
            good = wait_for<true>(lane, (u64*)lane.memory[rank] + peer, peer, seen,
                                  [before](u64 sent) { return sent > before; });
        }
        if (!__syncthreads_and(good)) return;
        char* box = lane.memory[rank] + lane.mails + (peer * 2 + (i64)(number & 1)) * lane.mail_bytes;
        copy((T*)box, (T*)(array + at), least(lane.mail_bytes, bytes - at));
        __syncthreads();
        if (threadIdx.x == 0) store_release((u64*)lane.memory[peer] + RANKS + rank, number + 1);
    }
    if (threadIdx.x == 0) *received = number;
}
#endif
