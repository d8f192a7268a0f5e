// out = x in another type, for arrays in C order. T: type of x; W: of what is read; O: of out. A thread takes EACH
// neighbours at a time, where both arrays begin at a multiple of 16 bytes.

#define EACH 8

extern "C" __global__ void cast(const T* x, O* out, i64 n) {
    i64 start = 0;
    if ((((u64)x | (u64)out) & 15) == 0) {
        for (i64 i = thread(); i < n / EACH; i += threads()) {
            W some[EACH];
            read<EACH>(x + i * EACH, some);
            write<EACH>(out + i * EACH, some);
        }
        start = n / EACH * EACH;
    }
    for (i64 i = start + thread(); i < n; i += threads()) out[i] = As<O>::of((W)wide(x[i]));
}
