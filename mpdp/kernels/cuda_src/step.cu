// What a captured step reads from the host, and what it tells the host: see kernels/board.py for the words.
// G: type of the gradient; T: of the loss. Built without fused multiply-add: the decision has the host's bits.

enum { LAUNCH, UPDATE, HALTED, APPLY, APPLIED, HALTED_STEP, SCALE, NORM, LOSS, COUNT, MINE, TICKET, HEAD = 16 };
enum { STEP = 16, START, ROWS, KNOWN, POWER, LOSS_SCALE, CLIP, SEED, SKIPS, NUMBERS = 32 };
enum { FULL, STATUS, TOTAL, COUNTED, OWN, LENGTH, FIRST, WHEN, REPORT = 8 };
enum { APPLIED_IT, SKIPPED, NOTHING, LOSS_LOST, GRADIENT_LOST, BROKEN };

// Bytes of `from` to `to`, and zeros behind them, by all threads of the grid.
__device__ __forceinline__ void copy_rows(char* to, const char* from, i64 bytes, i64 whole) {
    i64 start = 0;
    if ((((u64)to | (u64)from | (u64)bytes) & 15) == 0) {
        i64 i = thread(), step = threads(), all = bytes / 16;
        for (; i + 3 * step < all; i += 4 * step) {  // four loads under way at a time
            Four<float> some[4];
            #pragma unroll
            for (int k = 0; k < 4; k++) some[k] = ((const Four<float>*)from)[i + k * step];
            #pragma unroll
            for (int k = 0; k < 4; k++) ((Four<float>*)to)[i + k * step] = some[k];
        }
        for (; i < all; i += step) ((Four<float>*)to)[i] = ((const Four<float>*)from)[i];
        start = bytes;
    } else if ((((u64)to | (u64)from | (u64)bytes) & 3) == 0) {
        for (i64 i = thread(); i < bytes / 4; i += threads()) ((u32*)to)[i] = ((const u32*)from)[i];
        start = bytes;
    }
    for (i64 i = start + thread(); i < whole; i += threads()) to[i] = i < bytes ? from[i] : 0;
}

// Takes the first `words` of this launch's slot from the ring in host memory. One block: each request that crosses the
// bus costs nearly a microsecond, so every word is read once, and neighbours together.
extern "C" __global__ void begin(i64* board, const volatile i64* ring, i64 slots, i64 width, i64 table, i64 words) {
    const volatile i64* slot = ring + board[LAUNCH] % slots * width;
    i64 sources = HEAD + 2 * table;  // the words from here on lie behind the chosen numbers
    for (i64 i = threadIdx.x; i < words; i += blockDim.x) board[HEAD + i + (i < sources ? 0 : table)] = slot[i];
    __syncthreads();
    i64 chosen = NUMBERS + table * (board[APPLIED] - board[KNOWN]);
    for (i64 i = threadIdx.x; i < table; i += blockDim.x) board[NUMBERS + 2 * table + i] = board[chosen + i];
}

// Copies the arrays that the slot points at, from number `first` on. `rows` is what the targets are made for; the slot
// says how many there are.
extern "C" __global__ void fetch(const i64* board, i64 table, i64 first, i64 rows, char* to0, i64 bytes0, char* to1,
                                 i64 bytes1, char* to2, i64 bytes2, char* to3, i64 bytes3) {
    const i64* sources = board + NUMBERS + 3 * table + first;
    i64 there = rows ? board[ROWS] : 1, made = rows ? rows : 1;
    if (bytes0) copy_rows(to0, (const char*)sources[0], bytes0 / made * there, bytes0);
    if (bytes1) copy_rows(to1, (const char*)sources[1], bytes1 / made * there, bytes1);
    if (bytes2) copy_rows(to2, (const char*)sources[2], bytes2 / made * there, bytes2);
    if (bytes3) copy_rows(to3, (const char*)sources[3], bytes3 / made * there, bytes3);
}

// Adds the loss sum and the count of one micro-batch to the record. One thread.
extern "C" __global__ void take(i64* board, const T* total, double factor, NUMBER(count), i64 first) {
    double here = VALUE(count, 0);
    double* numbers = (double*)board;
    double loss = first ? 0 : numbers[MINE], counted = first ? 0 : numbers[COUNT];
    if (here != 0) loss += (double)wide(*total) * factor;  // a mean of nothing may be NaN
    numbers[LOSS] = numbers[MINE] = loss;
    numbers[COUNT] = counted + here;
    board[LAUNCH] += 1;
}

// Tells the host, in pinned memory, that so many chunks of this launch are final. One thread.
extern "C" __global__ void signal(const i64* board, volatile i64* word, i64 count) {
    __threadfence_system();
    *word = (board[LAUNCH] << 20) + count;
}

// Writes the float64 sum of squares of the block's span, as span_squares has it, NaN where an element is not finite,
// and 0 for a span that is not mine. Returns whether this block is the last to do so: it sees all sums then.
__device__ __forceinline__ bool add_span(i64* board, const G* x, double* out, i64 n, i64 span, bool mine) {
    __shared__ u32 before;
    i64 first = blockIdx.x * span, last = !mine ? first : first + span < n ? first + span : n;
    double sum = 0;
    int bad = 0;
    #pragma unroll 8
    for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) {
        double value = wide(x[i]);
        bad |= !(fabs(value) < infinity(value));
        sum += value * value;
    }
    sum = block_sum(sum);
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = bad ? not_a_number(sum) : sum;
        __threadfence();
        before = atomicAdd((u32*)(board + TICKET), 1);  // counts blocks; sums are added in the order of spans
        __threadfence();
    }
    __syncthreads();
    return before == gridDim.x - 1;
}

__device__ __forceinline__ i64 block_first(i64 value) {
    __shared__ i64 parts[32];
    for (int offset = 16; offset; offset >>= 1) {
        i64 other = __shfl_xor_sync(0xffffffffu, value, offset);
        value = other < value ? other : value;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; i++) value = parts[i] < value ? parts[i] : value;
    return value;
}

// Returns the first element that is not finite, found in the first span whose sum is NaN; -1 if no sum is. By a block.
__device__ __forceinline__ i64 first_bad(const volatile double* sums, i64 spans, const G* gradient, i64 size,
                                         i64 span) {
    i64 where = size;
    for (i64 i = threadIdx.x; i < spans; i += blockDim.x)
        if (sums[i] != sums[i] && i * span < where) where = i * span;
    where = block_first(where);
    if (where == size) return -1;
    i64 element = size;
    for (i64 i = where + threadIdx.x; i < where + span && i < size; i += blockDim.x)
        if (!(fabs(wide(gradient[i])) < infinity(wide(gradient[i]))) && i < element) element = i;
    return block_first(element);
}

// Fills what ranks that hold parts of the gradient add up: the sums of this rank's spans, and behind them for each rank
// the place of the first element that is not finite, counted from 1, 0 if all are. A block a span.
extern "C" __global__ void look(i64* board, double* parts, i64 spans, const G* gradient, i64 size, i64 span,
                                const unsigned char* own, i64 rank, i64 ranks) {
    if (!add_span(board, gradient, parts, size, span, own[blockIdx.x])) return;
    i64 bad = first_bad(parts, spans, gradient, size, span);
    if (threadIdx.x) return;
    board[TICKET] = 0;
    for (i64 i = 0; i < ranks; i++) parts[spans + i] = i == rank ? bad + 1 : 0;
}

// Decides what becomes of the update, and reports it; takes the loss before where `total` is not null. A block a span,
// of which the last one to be done decides; one block where ranks have added up what `look` has filled. It reads all
// that it needs at once: one after the other, each number would take as long. All words of the report make up its
// number, so they may arrive in any order: waiting for the bus before the last would take longer than the rest.
extern "C" __global__ void decide(i64* board, double* span_sums, i64 spans, const G* gradient, i64 size, i64 span,
                                  volatile i64* reports, i64 most, const volatile u32* broken, const T* total,
                                  double factor, NUMBER(count), i64 ranks) {
    __shared__ i64 words[NUMBERS];  // the board's, as they were
    __shared__ double taken, here;
    __shared__ u32 stopped;
    if (!ranks && !add_span(board, gradient, span_sums, size, span, true)) return;
    if (threadIdx.x < NUMBERS) words[threadIdx.x] = board[threadIdx.x];
    if (threadIdx.x == 32) taken = total ? (double)wide(*total) : 0;
    if (threadIdx.x == 64) here = VALUE(count, 0);
    if (threadIdx.x == 96) stopped = broken ? *broken : 0;
    const volatile double* sums = span_sums;
    double sum = 0;
    for (i64 i = threadIdx.x; i < spans; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum);
    i64 bad = -1;
    if (ranks) {
        for (i64 i = 0; i < ranks; i++) {
            i64 place = (i64)sums[spans + i];
            if (place && (bad < 0 || place <= bad)) bad = place - 1;
        }
    } else if (sum != sum) {
        bad = first_bad(sums, spans, gradient, size, span);
    }
    if (threadIdx.x) return;
    const double* numbers = (const double*)words;
    double loss = numbers[LOSS], mine = numbers[MINE], counted = numbers[COUNT], norm = 0, scale = 0;
    if (total) {
        loss = mine = here != 0 ? 0 + taken * factor : 0;
        counted = 0 + here;
    }
    i64 status = APPLIED_IT, halted = words[HALTED], when = words[HALTED_STEP];
    if (halted) {
        status = halted;
    } else if (stopped) {
        status = BROKEN;
    } else if (!(fabs(loss) < infinity(loss))) {
        status = LOSS_LOST;
    } else if (!(counted > 0)) {
        status = NOTHING;
    } else if (bad >= 0) {
        status = words[SKIPS] ? SKIPPED : GRADIENT_LOST;
    } else {
        scale = numbers[POWER] / counted / numbers[LOSS_SCALE];
        norm = sqrt(sum) * scale;
        double clip = numbers[CLIP];
        if (clip > 0) {
            double factor = clip / (norm + 1e-6);
            scale *= factor < 1 ? factor : 1;
        }
    }
    if (!halted && status >= LOSS_LOST) halted = status, when = words[STEP];
    double* written = (double*)board;
    i64 update = words[UPDATE];
    board[TICKET] = 0;
    if (total) {
        written[LOSS] = written[MINE] = loss, written[COUNT] = counted;
        board[LAUNCH] = words[LAUNCH] + 1;
    }
    board[HALTED] = halted, board[HALTED_STEP] = when;
    board[APPLY] = status == APPLIED_IT;
    board[APPLIED] = words[APPLIED] + (status == APPLIED_IT);
    written[SCALE] = scale, written[NORM] = norm;
    board[UPDATE] = update + 1;
    i64 report[REPORT];
    report[STATUS] = status, report[FIRST] = bad, report[WHEN] = halted ? when : words[STEP];
    report[TOTAL] = __double_as_longlong(loss), report[COUNTED] = __double_as_longlong(counted);
    report[OWN] = __double_as_longlong(mine), report[LENGTH] = __double_as_longlong(norm);
    report[FULL] = update + 1;
    for (int i = 1; i < REPORT; i++) report[FULL] ^= report[i];
    volatile i64* to = reports + update % most * REPORT;
    for (int i = 0; i < REPORT; i++) to[i] = report[i];
}
