// Images with channels last: layouts, bias and ReLU, pooling. T: stored type; W: type of the arithmetic. VEC: channels
// that a thread takes at a time. RELU: 1 or 0.

struct alignas(VEC * sizeof(T)) Pack { T v[VEC]; };

__device__ __forceinline__ Pack load(const T* p, i64 at) { return *(const Pack*)(p + at); }

// -- layouts ------------------------------------------------------------------------------------------------

// (count, channels, places) to (count, places, padded), 0 in the channels that are added; for few of them.
extern "C" __global__ void few_channels_last(const T* x, T* out, i64 count, i64 channels, i64 places, i64 padded) {
    for (i64 at = thread(); at < count * places; at += threads()) {
        i64 n = at / places, place = at - n * places;
        for (i64 c = 0; c < padded; c += VEC) {
            Pack r;
            #pragma unroll
            for (int i = 0; i < VEC; i++)
                r.v[i] = c + i < channels ? x[(n * channels + c + i) * places + place] : T{};
            *(Pack*)(out + at * padded + c) = r;
        }
    }
}

// The same by tiles of 32 x 32, for many. Block (32, 8); grid (tiles of places, tiles of padded, count).
extern "C" __global__ void channels_last(const T* x, T* out, i64 count, i64 channels, i64 places, i64 padded) {
    __shared__ T tile[32][33];
    for (i64 n = blockIdx.z; n < count; n += gridDim.z) {
        i64 place = blockIdx.x * 32LL + threadIdx.x, first = blockIdx.y * 32LL;
        for (int y = threadIdx.y; y < 32; y += 8) {
            i64 c = first + y;
            tile[y][threadIdx.x] = c < channels && place < places ? x[(n * channels + c) * places + place] : T{};
        }
        __syncthreads();
        i64 c = first + threadIdx.x;
        for (int y = threadIdx.y; y < 32; y += 8) {
            i64 at = blockIdx.x * 32LL + y;
            if (c < padded && at < places) out[(n * places + at) * padded + c] = tile[threadIdx.x][y];
        }
        __syncthreads();
    }
}

// (count, channels, height, width) to (count, rows, columns, 2 * VEC): blocks of 2 x 2 pixels, the first of them `top`
// and `left` pixels outside of the image; channels of the upper left pixel, the upper right one, and so on, then zeros.
extern "C" __global__ void folded(const T* x, T* out, i64 count, i64 channels, i64 height, i64 width, i64 rows,
                                  i64 columns, i64 top, i64 left) {
    for (i64 at = thread(); at < count * rows * columns; at += threads()) {
        i64 v = at % columns, rest = at / columns, u = rest % rows, n = rest / rows;
        Pack r[2];
        #pragma unroll
        for (int i = 0; i < 2 * VEC; i++) r[i / VEC].v[i % VEC] = T{};
        #pragma unroll
        for (int pixel = 0; pixel < 4; pixel++) {
            i64 y = 2 * u - top + pixel / 2, z = 2 * v - left + pixel % 2;
            if (y < 0 || y >= height || z < 0 || z >= width) continue;
            #pragma unroll
            for (int c = 0; c < 4; c++)
                if (c < channels) {
                    int place = pixel * (int)channels + c;
                    T value = x[((n * channels + c) * height + y) * width + z];
                    #pragma unroll
                    for (int i = 0; i < 2 * VEC; i++) if (i == place) r[i / VEC].v[i % VEC] = value;
                }
        }
        *(Pack*)(out + at * 2 * VEC) = r[0];
        *(Pack*)(out + at * 2 * VEC + VEC) = r[1];
    }
}

// out[row, c] = max(x[row, c] + bias[c], 0), of rows of `padded` to rows of `channels`; x may be out.
extern "C" __global__ void bias_relu(const T* x, const T* bias, T* out, i64 rows, i64 channels, i64 padded) {
    i64 groups = channels / VEC;
    for (i64 at = thread(); at < rows * groups; at += threads()) {
        i64 row = at / groups, c = (at - row * groups) * VEC;
        Pack a = load(x, row * padded + c), r;
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            W value = wide(a.v[i]);
            if (bias) value += wide(bias[c + i]);
            if (RELU) value = value < 0 ? (W)0 : value;
            r.v[i] = As<T>::of(value);
        }
        *(Pack*)(out + row * channels + c) = r;
    }
}

// -- pooling ------------------------------------------------------------------------------------------------

#define WINDOWS i64 count, i64 height, i64 width, i64 channels, i64 down, i64 across, i64 size_y, i64 size_x, \
    i64 step_y, i64 step_x, i64 pad_y, i64 pad_x  // down x across windows

// place: the first of equal maxima in its window, 255 where ReLU takes it; (count, down, across, channels) bytes.
extern "C" __global__ void max_pool(const T* x, T* out, u8* place, WINDOWS) {
    i64 groups = channels / VEC;
    for (i64 at = thread(); at < count * down * across * groups; at += threads()) {
        i64 c = at % groups * VEC, rest = at / groups, q = rest % across;
        rest /= across;
        i64 p = rest % down, n = rest / down;
        W best[VEC];
        u32 found[VEC];
        #pragma unroll
        for (int i = 0; i < VEC; i++) { best[i] = -infinity((W)0); found[i] = 254; }
        for (i64 i = 0; i < size_y; i++) {
            i64 row = p * step_y + i - pad_y;
            if (row < 0 || row >= height) continue;
            for (i64 j = 0; j < size_x; j++) {
                i64 column = q * step_x + j - pad_x;
                if (column < 0 || column >= width) continue;
                Pack a = load(x, ((n * height + row) * width + column) * channels + c);
                #pragma unroll
                for (int v = 0; v < VEC; v++) {
                    W value = wide(a.v[v]);
                    // The first pixel always counts, NaN wins over all and the first of NaN stays.
                    if (found[v] == 254 || value > best[v] || (value != value && best[v] == best[v])) {
                        best[v] = value;
                        found[v] = (u32)(i * size_x + j);
                    }
                }
            }
        }
        Pack r;
        #pragma unroll
        for (int v = 0; v < VEC; v++) {
            if (RELU && !(best[v] > 0)) {
                found[v] = 255;
                if (best[v] < 0) best[v] = 0;
            }
            r.v[v] = As<T>::of(best[v]);
            place[at * VEC + v] = (u8)found[v];
        }
        *(Pack*)(out + at * VEC) = r;
    }
}

// Each pixel adds up the windows that it won, in their order.
extern "C" __global__ void max_pool_backward(const T* g, const u8* place, T* out, WINDOWS) {
    i64 groups = channels / VEC;
    for (i64 at = thread(); at < count * height * width * groups; at += threads()) {
        i64 c = at % groups * VEC, rest = at / groups, column = rest % width;
        rest /= width;
        i64 row = rest % height, n = rest / height;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        i64 y = row + pad_y, x = column + pad_x;
        i64 first_p = y < size_y ? 0 : (y - size_y) / step_y + 1, last_p = y / step_y;
        i64 first_q = x < size_x ? 0 : (x - size_x) / step_x + 1, last_q = x / step_x;
        if (last_p >= down) last_p = down - 1;
        if (last_q >= across) last_q = across - 1;
        for (i64 p = first_p; p <= last_p; p++)
            for (i64 q = first_q; q <= last_q; q++) {
                u32 own = (u32)((y - p * step_y) * size_x + x - q * step_x);
                i64 window = ((n * down + p) * across + q) * channels + c;
                Pack a = load(g, window);
                #pragma unroll
                for (int v = 0; v < VEC; v++) if (place[window + v] == own) sum[v] += wide(a.v[v]);
            }
        Pack r;
        #pragma unroll
        for (int v = 0; v < VEC; v++) r.v[v] = As<T>::of(sum[v]);
        *(Pack*)(out + at * VEC) = r;
    }
}

extern "C" __global__ void avg_pool(const T* x, T* out, WINDOWS) {
    i64 groups = channels / VEC;
    W part = (W)(1.0 / (double)(size_y * size_x));
    for (i64 at = thread(); at < count * down * across * groups; at += threads()) {
        i64 c = at % groups * VEC, rest = at / groups, q = rest % across;
        rest /= across;
        i64 p = rest % down, n = rest / down;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        for (i64 i = 0; i < size_y; i++) {
            i64 row = p * step_y + i - pad_y;
            if (row < 0 || row >= height) continue;
            #pragma unroll 4
            for (i64 j = 0; j < size_x; j++) {
                i64 column = q * step_x + j - pad_x;
                if (column < 0 || column >= width) continue;
                Pack a = load(x, ((n * height + row) * width + column) * channels + c);
                #pragma unroll
                for (int v = 0; v < VEC; v++) sum[v] += wide(a.v[v]);
            }
        }
        Pack r;
        #pragma unroll
        for (int v = 0; v < VEC; v++) r.v[v] = As<T>::of(sum[v] * part);
        *(Pack*)(out + at * VEC) = r;
    }
}

extern "C" __global__ void avg_pool_backward(const T* g, T* out, WINDOWS) {
    i64 groups = channels / VEC;
    W part = (W)(1.0 / (double)(size_y * size_x));
    for (i64 at = thread(); at < count * height * width * groups; at += threads()) {
        i64 c = at % groups * VEC, rest = at / groups, column = rest % width;
        rest /= width;
        i64 row = rest % height, n = rest / height;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        i64 y = row + pad_y, x = column + pad_x;
        i64 first_p = y < size_y ? 0 : (y - size_y) / step_y + 1, last_p = y / step_y;
        i64 first_q = x < size_x ? 0 : (x - size_x) / step_x + 1, last_q = x / step_x;
        if (last_p >= down) last_p = down - 1;
        if (last_q >= across) last_q = across - 1;
        for (i64 p = first_p; p <= last_p; p++)
            for (i64 q = first_q; q <= last_q; q++) {
                Pack a = load(g, ((n * down + p) * across + q) * channels + c);
                #pragma unroll
                for (int v = 0; v < VEC; v++) sum[v] += wide(a.v[v]) * part;
            }
        Pack r;
        #pragma unroll
        for (int v = 0; v < VEC; v++) r.v[v] = As<T>::of(sum[v]);
        *(Pack*)(out + at * VEC) = r;
    }
}
