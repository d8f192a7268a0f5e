// Tables of tokens and positions. T: stored type; W: of sums; O: of a result; INDEX: type of the tokens; N: columns
// that a thread takes at once. A row of the result is a token at one of `length` positions of a sequence.

// out[i] = tokens[index[i]] + positions[i % length]; NaN for an index that is no row.
extern "C" __global__ void token_sums(const T* tokens, const T* positions, const INDEX* index, T* out, i64 n,
                                      i64 rows, i64 length, i64 width) {
    i64 across = width / N, at = thread(), i = at / across, column = (at - i * across) * N;
    if (i >= n) return;
    i64 row = (i64)index[i];
    W a[N], b[N];
    read<N>(positions + i % length * width + column, b);
    if (row < 0 || row >= rows) {
        #pragma unroll
        for (int k = 0; k < N; k++) a[k] = not_a_number((W)0);
    } else {
        read<N>(tokens + row * width + column, a);
    }
    #pragma unroll
    for (int k = 0; k < N; k++) a[k] += b[k];
    write<N>(out + i * width + column, a);
}

// out (size) = the sum of g (count, size) over its first axis, in order, plus what is there where `accumulate`.
extern "C" __global__ void first_axis_sums(const T* g, O* out, i64 count, i64 size, i64 accumulate) {
    i64 at = thread() * N;
    if (at >= size) return;
    W sum[N] = {};
    for (i64 start = 0; start < count; start += 8) {
        W ahead[8][N];
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (start + j < count) read<N>(g + (start + j) * size + at, ahead[j]);
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (start + j < count) {
                #pragma unroll
                for (int k = 0; k < N; k++) sum[k] += ahead[j][k];
            }
        }
    }
    if (accumulate) {
        W old[N];
        read<N>((const O*)out + at, old);
        #pragma unroll
        for (int k = 0; k < N; k++) sum[k] += old[k];
    }
    write<N>(out + at, sum);
}
