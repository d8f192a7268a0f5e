// Batch norm of rows (rows, channels), channels last: moments, normalisation with residual and ReLU, and backward.
// T: stored type; W: type of the arithmetic; P: type of weight and bias; O: type of their gradients; R: type of running
// statistics. VEC: channels that a thread takes at a time; UNROLL: rows that it loads at a time; BLOCKS: that run on a
// multiprocessor at once. RELU, RESIDUAL, CENTRED, PAIR: 1 or 0.
//
// A block (x: groups of VEC channels, y: rows) sweeps over tiles of UNROLL * blockDim.y rows, the grid over all of them
// together. Sums sweep from the last row and what comes after them from the first: so each finds what the
// one before it read last in the L2 cache.

struct alignas(VEC * sizeof(T)) Pack { T v[VEC]; };

__device__ __forceinline__ Pack load(const T* p, i64 row, i64 channels, i64 at) {
    return *(const Pack*)(p + row * channels + at);
}

__device__ __forceinline__ T rounded(W value) { return As<T>::of(value); }

#define GEOMETRY \
    i64 at = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * VEC; \
    bool here = at < channels; \
    i64 tile_rows = UNROLL * (i64)blockDim.y, tiles = (rows + tile_rows - 1) / tile_rows;
#define FORWARD(tile) ((tile) * tile_rows + threadIdx.y)
#define BACKWARD(tile) ((tiles - 1 - (tile)) * tile_rows + threadIdx.y)

// Rows that each of `blocks` blocks has swept over: the last tile, which may be short, is that of block 0.
struct Swept {
    i64 each, more, missing, tile_rows;

    __device__ __forceinline__ Swept(i64 blocks, i64 rows, i64 tile_rows) : tile_rows(tile_rows) {
        i64 tiles = (rows + tile_rows - 1) / tile_rows;
        each = tiles / blocks, more = tiles - each * blocks, missing = tiles * tile_rows - rows;
    }
    __device__ __forceinline__ i64 of(i64 b) const {
        return (each + (b < more)) * tile_rows - (b == 0 ? missing : 0);
    }
};

// The sum over threadIdx.y of a block of (32, 32) threads, to all threads of a column.
__device__ __forceinline__ double column_sum(double value) {
    __shared__ double parts[32][33], totals[32];
    __syncthreads();  // an earlier call may still be read
    parts[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    double total = warp_sum(parts[threadIdx.x][threadIdx.y]);
    if (threadIdx.x == 0) totals[threadIdx.y] = total;
    __syncthreads();
    return totals[threadIdx.x];
}

// -- moments ------------------------------------------------------------------------------------------------

// Everything is taken from the first row of x, so that numbers far from 0 lose no digits of their mean.
// partial: (blocks, 2, channels): mean of what the block has seen, and sum of squared differences from it.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) moments(const T* x, W* partial, i64 rows, i64 channels) {
    __shared__ W shared[2 * 256 * VEC];  // (2, blockDim.y, blockDim.x * VEC)
    __shared__ int counts[256];
    GEOMETRY
    W origin[VEC], mean[VEC], square[VEC];
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        origin[i] = here && rows > 0 ? (W)wide(x[at + i]) : (W)0;
        mean[i] = square[i] = 0;
    }
    int count = 0;
    if (here) for (i64 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        i64 row = BACKWARD(tile);
        Pack a[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (row + u * blockDim.y < rows) a[u] = load(x, row + u * blockDim.y, channels, at);
        // The rows loaded together have a mean and squares about it; these join what there was, as parts do that are
        // merged: as right far from 0 as Welford's steps from row to row, and no division for each.
        if (row + (UNROLL - 1) * blockDim.y < rows) {
            W part = UNROLL / (W)(count + UNROLL), both = count * part;
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                W value[UNROLL], own = 0, squares = 0;
                #pragma unroll
                for (int u = 0; u < UNROLL; u++) own += value[u] = wide(a[u].v[i]) - origin[i];
                own *= (W)(1.0 / UNROLL);
                #pragma unroll
                for (int u = 0; u < UNROLL; u++) squares += (value[u] - own) * (value[u] - own);
                W away = own - mean[i];
                mean[i] += away * part;
                square[i] += squares + away * away * both;
            }
            count += UNROLL;
        } else {
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
                count++;
                W part = 1 / (W)count;
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    W away = wide(a[u].v[i]) - origin[i] - mean[i];
                    mean[i] += away * part;
                    square[i] += away * away * (1 - part);
                }
            }
        }
    }
    int width = blockDim.x * VEC;
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        shared[threadIdx.y * width + threadIdx.x * VEC + i] = mean[i];
        shared[(blockDim.y + threadIdx.y) * width + threadIdx.x * VEC + i] = square[i];
    }
    if (threadIdx.x == 0) counts[threadIdx.y] = count;  // thread 0 always has channels
    __syncthreads();
    i64 first = blockIdx.x * (i64)width;
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < width; c += blockDim.x * blockDim.y) {
        if (first + c >= channels) break;
        W total = 0, sum = 0, squares = 0;
        for (int y = 0; y < blockDim.y; y++) {
            total += counts[y];
            sum += counts[y] * shared[y * width + c];
        }
        W middle = total > 0 ? sum / total : 0;
        for (int y = 0; y < blockDim.y; y++) {
            W away = shared[y * width + c] - middle;
            squares += shared[(blockDim.y + y) * width + c] + counts[y] * away * away;
        }
        partial[blockIdx.y * 2 * channels + first + c] = middle;
        partial[(blockIdx.y * 2 + 1) * channels + first + c] = squares;
    }
}

// statistics: count, then mean and 1 / sqrt(variance + eps) of each channel. A batch of one value has no unbiased
// variance, an empty one no mean, and one that is not finite ends the run: the running numbers then stay.
__device__ void publish(i64 c, i64 channels, double count, double mean, double squares, double eps,
                        double* statistics, R* running_mean, R* running_variance, double momentum) {
    double within = count > 1 ? count : 1;
    if (c == 0) statistics[0] = count;
    statistics[1 + c] = mean;
    statistics[1 + channels + c] = 1 / sqrt(squares / within + eps);
    if (!running_mean) return;
    double variance = squares / (count > 2 ? count - 1 : 1);
    double old = wide(running_mean[c]), moved = old + momentum * (mean - old);
    if (count >= 1 && fabs(mean) < infinity(mean)) running_mean[c] = As<R>::of(moved);
    old = wide(running_variance[c]), moved = old + momentum * (variance - old);
    if (count >= 2 && fabs(variance) < infinity(variance)) running_variance[c] = As<R>::of(moved);
}

// Block (32, 32): 32 channels. Writes count, means and squares to `out`, or publishes them.
extern "C" __global__ void moments_finish(const T* x, const W* partial, double* out, i64 blocks, i64 rows, i64 channels,
                                          i64 tile_rows, double eps, double* statistics, R* running_mean,
                                          R* running_variance, double momentum) {
    i64 c = blockIdx.x * 32LL + threadIdx.x;
    Swept swept(blocks, rows, tile_rows);
    double sum = 0, squares = 0;
    if (c < channels)
        for (i64 b = threadIdx.y; b < blocks; b += 32) sum += swept.of(b) * (double)partial[b * 2 * channels + c];
    double mean = column_sum(sum) / (rows > 0 ? rows : 1);
    if (c < channels)
        for (i64 b = threadIdx.y; b < blocks; b += 32) {
            double away = (double)partial[b * 2 * channels + c] - mean;
            squares += (double)partial[(b * 2 + 1) * channels + c];
            squares += swept.of(b) * away * away;
        }
    squares = column_sum(squares);
    if (threadIdx.y || c >= channels) return;
    if (rows > 0) mean += (double)wide(x[c]);
    if (statistics)
        publish(c, channels, rows, mean, squares, eps, statistics, running_mean, running_variance, momentum);
    else {
        if (c == 0) out[0] = rows;
        out[1 + c] = mean;
        out[1 + channels + c] = squares;
    }
}

// Merges the moments of several parts in order; each is a count, means and squares.
extern "C" __global__ void moments_merge(const double* gathered, i64 parts, i64 channels, double eps,
                                         double* statistics, R* running_mean, R* running_variance,
                                         double momentum) {
    i64 c = thread(), width = 1 + 2 * channels;
    if (c >= channels) return;
    double count = 0, mean = 0, squares = 0;
    for (i64 i = 0; i < parts; i++) count += gathered[i * width];
    for (i64 i = 0; i < parts; i++)
        mean += gathered[i * width] / (count > 1 ? count : 1) * gathered[i * width + 1 + c];
    for (i64 i = 0; i < parts; i++) {
        double away = gathered[i * width + 1 + c] - mean;
        squares += gathered[i * width + 1 + channels + c] + gathered[i * width] * away * away;
    }
    publish(c, channels, count, mean, squares, eps, statistics, running_mean, running_variance, momentum);
}

// -- normalisation ------------------------------------------------------------------------------------------

struct Affine { W mean[VEC], scale[VEC], shift[VEC]; };

__device__ __forceinline__ Affine affine(i64 at, const double* mean, const double* rstd, const P* weight,
                                         const P* bias) {
    Affine out;
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        out.mean[i] = (W)mean[at + i];
        out.scale[i] = (W)(weight ? rstd[at + i] * (double)wide(weight[at + i]) : rstd[at + i]);
        out.shift[i] = bias ? (W)wide(bias[at + i]) : (W)0;
    }
    return out;
}

// Forward and the mask that backward takes must be the same expression.
__device__ __forceinline__ W applied(const Affine& a, int i, W x) {
    return fma(x - a.mean[i], a.scale[i], a.shift[i]);
}

// positive: with RELU and RESIDUAL, a bit a number: (rows, channels / VEC) bytes.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
normalise(const T* x, const double* mean, const double* rstd, const P* weight, const P* bias, const T* residual,
          T* out, u8* positive, i64 rows, i64 channels) {
    GEOMETRY
    if (!here) return;
    Affine own = affine(at, mean, rstd, weight, bias);
    for (i64 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        i64 row = FORWARD(tile);
        Pack a[UNROLL], b[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
            a[u] = load(x, row + u * blockDim.y, channels, at);
            if (RESIDUAL) b[u] = load(residual, row + u * blockDim.y, channels, at);
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
            Pack r;
            u32 bits = 0;
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                W value = applied(own, i, wide(a[u].v[i]));
                if (RESIDUAL) value += wide(b[u].v[i]);
                if (RELU) {
                    bits |= (u32)(value > 0) << i;
                    value = value < 0 ? (W)0 : value;  // NaN stays
                }
                r.v[i] = rounded(value);
            }
            i64 place = (row + u * blockDim.y) * channels + at;
            *(Pack*)(out + place) = r;
            if (RELU && RESIDUAL) positive[place / VEC] = (u8)bits;
        }
    }
}

// -- backward -----------------------------------------------------------------------------------------------

// The gradient before ReLU: from the bits where there is a residual, else from x again.
__device__ __forceinline__ W before_relu(W g, const Affine& own, int i, W x, u32 bits) {
    if (!RELU) return g;
    bool kept = RESIDUAL ? (bits >> i) & 1 : applied(own, i, x) > 0;
    return (kept ? (W)1 : (W)0) * g;
}

// partial: (blocks, 2, channels): sums of g and of g * (x - mean). With RELU and RESIDUAL, g before ReLU is written
// out. With PAIR, the gradient is the sum of g and h.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
channel_sums(const T* g, const T* h, const T* x, const u8* positive, const double* mean, const double* rstd,
             const P* weight, const P* bias, T* masked, W* partial, i64 rows, i64 channels) {
    __shared__ W shared[2 * 256 * VEC];
    GEOMETRY
    W sum[VEC], along[VEC];
    #pragma unroll
    for (int i = 0; i < VEC; i++) sum[i] = along[i] = 0;
    if (here) {
        Affine own = affine(at, mean, rstd, weight, bias);
        for (i64 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
            i64 row = BACKWARD(tile);
            Pack a[UNROLL], b[UNROLL], c[UNROLL];
            u32 bits[UNROLL];
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
                a[u] = load(g, row + u * blockDim.y, channels, at);
                b[u] = load(x, row + u * blockDim.y, channels, at);
                if (PAIR) c[u] = load(h, row + u * blockDim.y, channels, at);
                if (RELU && RESIDUAL) bits[u] = positive[((row + u * blockDim.y) * channels + at) / VEC];
            }
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
                Pack r;
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    W value = wide(b[u].v[i]), gradient = wide(a[u].v[i]);
                    if (PAIR) gradient += wide(c[u].v[i]);
                    gradient = before_relu(gradient, own, i, value, bits[u]);
                    sum[i] += gradient;
                    along[i] = fma(gradient, value - own.mean[i], along[i]);
                    if (RELU && RESIDUAL) r.v[i] = rounded(gradient);
                }
                if (RELU && RESIDUAL) *(Pack*)(masked + (row + u * blockDim.y) * channels + at) = r;
            }
        }
    }
    int width = blockDim.x * VEC;
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        shared[threadIdx.y * width + threadIdx.x * VEC + i] = sum[i];
        shared[(blockDim.y + threadIdx.y) * width + threadIdx.x * VEC + i] = along[i];
    }
    __syncthreads();
    i64 first = blockIdx.x * (i64)width;
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < width; c += blockDim.x * blockDim.y) {
        if (first + c >= channels) break;
        W one = 0, other = 0;
        for (int y = 0; y < blockDim.y; y++) {
            one += shared[y * width + c];
            other += shared[(blockDim.y + y) * width + c];
        }
        partial[blockIdx.y * 2 * channels + first + c] = one;
        partial[(blockIdx.y * 2 + 1) * channels + first + c] = other;
    }
}

// Block (32, 32): 32 channels. sums: (2, channels), of g and of g times normalised x; gain and shift are the gradients
// of weight and bias, where they are wanted.
extern "C" __global__ void channel_sums_finish(const W* partial, const double* rstd, double* sums, O* gain,
                                               O* shift, i64 blocks, i64 channels, i64 add_gain, i64 add_shift) {
    i64 c = blockIdx.x * 32LL + threadIdx.x;
    double one = 0, other = 0;
    if (c < channels)
        for (i64 b = threadIdx.y; b < blocks; b += 32) {
            one += (double)partial[b * 2 * channels + c];
            other += (double)partial[(b * 2 + 1) * channels + c];
        }
    one = column_sum(one);
    other = column_sum(other);
    if (threadIdx.y || c >= channels) return;
    other *= rstd[c];
    sums[c] = one;
    sums[channels + c] = other;
    if (gain) gain[c] = As<O>::of(add_gain ? other + (double)wide(gain[c]) : other);
    if (shift) shift[c] = As<O>::of(add_shift ? one + (double)wide(shift[c]) : one);
}

// out = rstd * weight * (g - sums[0] / count - normal * sums[1] / count), or without the sums where CENTRED is 0.
// With RELU and RESIDUAL, g is what channel_sums wrote, so here RELU stands for ReLU without a residual.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
normalise_backward(const T* g, const T* x, const double* mean, const double* rstd, const P* weight, const P* bias,
                   const double* sums, const double* count, T* out, i64 rows, i64 channels) {
    GEOMETRY
    if (!here) return;
    Affine own = affine(at, mean, rstd, weight, bias);
    W constant[VEC], slope[VEC];
    if (CENTRED) {
        double part = 1 / (*count > 1 ? *count : 1);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            constant[i] = (W)(part * sums[at + i]);
            slope[i] = (W)(part * sums[channels + at + i] * rstd[at + i]);
        }
    }
    for (i64 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        i64 row = FORWARD(tile);
        Pack a[UNROLL], b[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
            a[u] = load(g, row + u * blockDim.y, channels, at);
            if (CENTRED || RELU) b[u] = load(x, row + u * blockDim.y, channels, at);
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) if (row + u * blockDim.y < rows) {
            Pack r;
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                W value = CENTRED || RELU ? (W)wide(b[u].v[i]) : (W)0;
                W gradient = before_relu(wide(a[u].v[i]), own, i, value, 0);
                // The mean goes before the scale: the gradient of a batch of one value is 0, not a rounding of it.
                if (CENTRED) gradient = (gradient - constant[i]) - (value - own.mean[i]) * slope[i];
                gradient *= own.scale[i];
                r.v[i] = rounded(gradient);
            }
            *(Pack*)(out + (row + u * blockDim.y) * channels + at) = r;
        }
    }
}
