// Images with channels last: layouts, bias and ReLU, pooling. T: stored type; W: type of the arithmetic. VEC: channels
// that a thread takes at a time. RELU: 1 or 0. I: type of indices. WINDOW, STEP: of pooling, the
// length of a square window and its step where they are known when this is built, or 0.

struct alignas(VEC * sizeof(T)) Pack { T v[VEC]; };

__device__ __forceinline__ Pack load(const T* p, i64 at) { return *(const Pack*)(p + at); }

// -- layouts ------------------------------------------------------------------------------------------------

// (count, channels, places) to (count, places, padded), 0 in the channels that are added; for few of them.
extern "C" __global__ void few_channels_last(const T* x, T* out, I count, I channels, I places, I padded) {
    for (I at = (I)thread(); at < count * places; at += (I)threads()) {
        I n = at / places, place = at - n * places;
        for (I c = 0; c < padded; c += VEC) {
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

template <int C>
__device__ __forceinline__ void fold(const T* x, T* out, I count, I height, I width, I rows, I columns, I top, I left) {
    for (I at = (I)thread(); at < count * rows * columns; at += (I)threads()) {
        I v = at % columns, rest = at / columns, u = rest % rows, n = rest / rows;
        Pack r[2];
        #pragma unroll
        for (int i = 0; i < 2 * VEC; i++) r[i / VEC].v[i % VEC] = T{};
        #pragma unroll
        for (int pixel = 0; pixel < 4; pixel++) {
            I y = 2 * u - top + pixel / 2, z = 2 * v - left + pixel % 2;
            if (y < 0 || y >= height || z < 0 || z >= width) continue;
            #pragma unroll
            for (int c = 0; c < C; c++)
                if (pixel * C + c < 2 * VEC)  // always, where this is launched
                    r[(pixel * C + c) / VEC].v[(pixel * C + c) % VEC] = x[((n * C + c) * height + y) * width + z];
        }
        *(Pack*)(out + at * 2 * VEC) = r[0];
        *(Pack*)(out + at * 2 * VEC + VEC) = r[1];
    }
}

// (count, channels, height, width) to (count, rows, columns, 2 * VEC): blocks of 2 x 2 pixels, the first of them `top`
// and `left` pixels outside of the image; channels of the upper left pixel, the upper right one, and so on, then zeros.
extern "C" __global__ void folded(const T* x, T* out, I count, I channels, I height, I width, I rows, I columns,
                                  I top, I left) {
    if (channels == 1) fold<1>(x, out, count, height, width, rows, columns, top, left);
    else if (channels == 2) fold<2>(x, out, count, height, width, rows, columns, top, left);
    else if (channels == 3) fold<3>(x, out, count, height, width, rows, columns, top, left);
    else fold<4>(x, out, count, height, width, rows, columns, top, left);
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

// Blocks: x over the packs of a line of pixels or windows, y over lines of all images.
#define WINDOWS I count, I height, I width, I channels, I down, I across, I given_y, I given_x, I given_step_y, \
    I given_step_x, I pad_y, I pad_x  // down x across windows
#define SIZES \
    const I size_y = WINDOW ? WINDOW : given_y, size_x = WINDOW ? WINDOW : given_x, groups = channels / VEC; \
    const I step_y = STEP ? STEP : given_step_y, step_x = STEP ? STEP : given_step_x;
#define EACH(lines, length) \
    for (I line = blockIdx.y; line < count * (lines); line += gridDim.y) \
        for (I along = (I)thread(); along < (length) * groups; along += (I)threads())

struct alignas(VEC) Places { u8 v[VEC]; };

// place: the first of equal maxima in its window, 255 where ReLU takes it; (count, down, across, channels) bytes.
extern "C" __global__ void max_pool(const T* x, T* out, u8* place, WINDOWS) {
    SIZES
    EACH(down, across) {
        I q = along / groups, c = (along - q * groups) * VEC, n = line / down, p = line - n * down;
        I at = line * across * groups + along;
        W best[VEC];
        u32 found[VEC];
        #pragma unroll
        for (int i = 0; i < VEC; i++) { best[i] = -infinity((W)0); found[i] = 254; }
        #pragma unroll
        for (I i = 0; i < size_y; i++) {
            I row = p * step_y + i - pad_y;
            if (row < 0 || row >= height) continue;
            #pragma unroll
            for (I j = 0; j < size_x; j++) {
                I column = q * step_x + j - pad_x;
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
        Places won;
        #pragma unroll
        for (int v = 0; v < VEC; v++) {
            if (RELU && !(best[v] > 0)) {
                found[v] = 255;
                if (best[v] < 0) best[v] = 0;
            }
            r.v[v] = As<T>::of(best[v]);
            won.v[v] = (u8)found[v];
        }
        *(Pack*)(out + at * VEC) = r;
        *(Places*)(place + at * VEC) = won;
    }
}

// The windows that hold a pixel of column or row `at`: from `first` to `last`.
__device__ __forceinline__ void windows_of(I at, I size, I step, I most, I& first, I& last) {
    first = at < size ? 0 : (at - size) / step + 1;
    last = at / step;
    if (last >= most) last = most - 1;
}

// Each pixel adds up the windows that it won, in their order.
extern "C" __global__ void max_pool_backward(const T* g, const u8* place, T* out, WINDOWS) {
    SIZES
    EACH(height, width) {
        I column = along / groups, c = (along - column * groups) * VEC, n = line / height, row = line - n * height;
        I at = line * width * groups + along;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        I y = row + pad_y, x = column + pad_x, first_p, last_p, first_q, last_q;
        windows_of(y, size_y, step_y, down, first_p, last_p);
        windows_of(x, size_x, step_x, across, first_q, last_q);
        for (I p = first_p; p <= last_p; p++)
            for (I q = first_q; q <= last_q; q++) {
                u32 own = (u32)((y - p * step_y) * size_x + x - q * step_x);
                I window = ((n * down + p) * across + q) * channels + c;
                Pack a = load(g, window);
                Places won = *(const Places*)(place + window);
                #pragma unroll
                for (int v = 0; v < VEC; v++) if (won.v[v] == own) sum[v] += wide(a.v[v]);
            }
        Pack r;
        #pragma unroll
        for (int v = 0; v < VEC; v++) r.v[v] = As<T>::of(sum[v]);
        *(Pack*)(out + at * VEC) = r;
    }
}

extern "C" __global__ void avg_pool(const T* x, T* out, WINDOWS) {
    SIZES
    W part = (W)(1.0 / (double)(size_y * size_x));
    EACH(down, across) {
        I q = along / groups, c = (along - q * groups) * VEC, n = line / down, p = line - n * down;
        I at = line * across * groups + along;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        for (I i = 0; i < size_y; i++) {
            I row = p * step_y + i - pad_y;
            if (row < 0 || row >= height) continue;
            #pragma unroll 4
            for (I j = 0; j < size_x; j++) {
                I column = q * step_x + j - pad_x;
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
    SIZES
    W part = (W)(1.0 / (double)(size_y * size_x));
    EACH(height, width) {
        I column = along / groups, c = (along - column * groups) * VEC, n = line / height, row = line - n * height;
        I at = line * width * groups + along;
        W sum[VEC];
        #pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = 0;
        I y = row + pad_y, x = column + pad_x, first_p, last_p, first_q, last_q;
        windows_of(y, size_y, step_y, down, first_p, last_p);
        windows_of(x, size_x, step_x, across, first_q, last_q);
        for (I p = first_p; p <= last_p; p++)
            for (I q = first_q; q <= last_q; q++) {
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
