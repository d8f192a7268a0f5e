// Sums over equal indices in a fixed order, without a library's sort: an index and where it came from are one number,
// so all numbers differ and there is one sorted order. INDEX: type of the indices; T: stored type of what is added;
// W: of sums; O: of the result; N: neighbouring columns that a thread takes at once.

#define RUN 256             // numbers that one block sorts, a thread each
#define MERGED 16           // runs that are merged at once
#define NOTHING (~(u64)0)
#define NO_ROW 0xffffffffu  // of indices out of range, which add nothing

// -- sort ---------------------------------------------------------------------------------------------------

// Sorts runs of RUN numbers (index, position), a thread for each: its place is the count of smaller ones.
extern "C" __global__ void sort_runs(const INDEX* index, u64* out, i64 n, i64 rows) {
    __shared__ u64 run[RUN];
    i64 at = thread();
    u64 value = NOTHING;
    if (at < n) {
        i64 row = (i64)index[at];
        value = (u64)(row < 0 || row >= rows ? NO_ROW : (u32)row) << 32 | (u32)at;
    }
    run[threadIdx.x] = value;
    __syncthreads();
    int place = 0;
    #pragma unroll 16
    for (int i = 0; i < RUN; i++) place += run[i] < value;
    if (at < n) out[at - threadIdx.x + place] = value;
}

// Merges up to MERGED sorted runs of `length` numbers, MERGED threads for each number: a thread counts the smaller ones
// in a run.
extern "C" __global__ void merge_runs(const u64* in, u64* out, i64 n, i64 length) {
    i64 i = thread() / MERGED;
    bool here = i < n;
    if (!here) i = n - 1;  // all threads of a warp take part in the sum
    u64 value = in[i];
    i64 first = i / (MERGED * length) * (MERGED * length), run = first + threadIdx.x % MERGED * length, place = 0;
    if (run == i / length * length) {
        place = i - run;
    } else if (run < n) {
        i64 low = run, high = run + length < n ? run + length : n;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if (in[middle] < value) low = middle + 1;
            else high = middle;
        }
        place = low - run;
    }
    #pragma unroll
    for (int offset = MERGED / 2; offset; offset >>= 1) place += __shfl_xor_sync(0xffffffffu, place, offset);
    if (here && threadIdx.x % MERGED == 0) out[first + place] = value;
}

// -- sums ---------------------------------------------------------------------------------------------------
// The sorted numbers are cut into pieces of PIECE. A piece adds what belongs to one row; a row inside one piece is
// written at once, and of others the pieces leave parts: the first row's (that began before) and the last's.

#define PIECE 16
#define ROW(p) ((u32)(sorted[p] >> 32))

__device__ __forceinline__ void put(O* out, const W* sum, i64 accumulate) {
    W total[N];
    #pragma unroll
    for (int k = 0; k < N; k++) total[k] = sum[k];
    if (accumulate) {
        W old[N];
        read<N>(out, old);
        #pragma unroll
        for (int k = 0; k < N; k++) total[k] += old[k];
    }
    write<N>(out, total);
}

// parts: (pieces, 2, width).
extern "C" __global__ void piece_sums(const T* g, const u64* sorted, W* parts, O* out, i64 n, i64 width,
                                      i64 accumulate) {
    i64 across = width / N, i = thread(), piece = i / across, column = (i - piece * across) * N;
    i64 start = piece * PIECE, stop = start + PIECE < n ? start + PIECE : n;
    if (start >= n) return;
    u32 row = ROW(start);
    bool begun = start > 0 && ROW(start - 1) == row;  // the row began in an earlier piece
    W sum[N] = {};
    for (i64 p = start; p < stop; p += 8) {
        W ahead[8][N];
        u32 at[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (p + j < stop) {
                u64 value = sorted[p + j];
                at[j] = (u32)(value >> 32);
                read<N>(g + (i64)(u32)value * width + column, ahead[j]);
            }
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (p + j >= stop) break;
            if (at[j] != row) {
                if (begun) write<N>(parts + piece * 2 * width + column, sum);
                else if (row != NO_ROW) put(out + row * width + column, sum, accumulate);
                row = at[j];
                begun = false;
                #pragma unroll
                for (int k = 0; k < N; k++) sum[k] = 0;
            }
            #pragma unroll
            for (int k = 0; k < N; k++) sum[k] += ahead[j][k];
        }
    }
    bool open = stop < n && ROW(stop) == row;
    if (begun) write<N>(parts + piece * 2 * width + column, sum);
    else if (open) write<N>(parts + (piece * 2 + 1) * width + column, sum);
    else if (row != NO_ROW) put(out + row * width + column, sum, accumulate);
}

// Adds the parts of the row that begins in a piece and goes on behind it, in the order of the pieces.
extern "C" __global__ void piece_finish(const u64* sorted, const W* parts, O* out, i64 n, i64 width,
                                        i64 accumulate) {
    i64 across = width / N, i = thread(), piece = i / across, column = (i - piece * across) * N;
    i64 start = piece * PIECE, stop = start + PIECE;
    if (stop >= n) return;
    u32 row = ROW(stop - 1);
    if (row == NO_ROW || ROW(stop) != row || (start > 0 && ROW(start - 1) == row)) return;
    W sum[N];
    read<N>(parts + (piece * 2 + 1) * width + column, sum);
    // How many pieces the row goes on in: all begin with it.
    i64 last = piece + 1, pieces = (n + PIECE - 1) / PIECE;
    while (last < pieces && ROW(last * PIECE) == row) last++;
    for (i64 p = piece + 1; p < last; p += 8) {
        W ahead[8][N];
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (p + j < last) read<N>(parts + (p + j) * 2 * width + column, ahead[j]);
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (p + j < last) {
                #pragma unroll
                for (int k = 0; k < N; k++) sum[k] += ahead[j][k];
            }
        }
    }
    put(out + row * width + column, sum, accumulate);
}
