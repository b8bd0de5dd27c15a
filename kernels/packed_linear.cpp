// One product of packed_linear.h in a call, and the layout of its weights; see packed_linear.py.

#include "packed_linear.h"

#ifndef PRODUCTS

extern "C" {
int usable() { return 0; }
void pack(const bf16*, const bf16*, bf16*, int64_t, int64_t) {}
void linear(const bf16*, int64_t, const bf16*, const bf16*, int64_t, void*, int64_t, int64_t,
            int64_t, int, int) {}
}

#else

using namespace product;

namespace {

// Where row `row` of the blocks of W^T lies.
inline int64_t place(int64_t pair, int64_t half, int64_t k, int64_t column, int64_t in) {
    return (pair * (in / K) + k / K) * PAIR + half * BLOCK + (k % K / 2) * 2 * COLUMNS +
           column * 2 + k % 2;
}

}  // namespace

extern "C" {

int usable() { return granted(); }

// weight [out, in] -> packed, with rows and columns of zeros up to 32; a second matrix of the same
// shape takes the second block of each pair, else the next 16 columns do.
void pack(const bf16* weight, const bf16* second, bf16* packed, int64_t out, int64_t in) {
    const int64_t wide = (in + K - 1) / K * K, own = second ? COLUMNS : 2 * COLUMNS;
    const int64_t pairs = (out + own - 1) / own;
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t half = 0; half < 2; half++)
            for (int64_t column = 0; column < COLUMNS; column++) {
                const int64_t o = pair * own + (second ? 0 : half * COLUMNS) + column;
                const bf16* row = (half && second ? second : weight) + o * in;
                for (int64_t k = 0; k < wide; k++)
                    packed[place(pair, half, k, column, wide)] =
                        o < out && k < in ? row[k] : bf16{0};
            }
}

// y is bfloat16, or float32 where `widened`.
void linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* other,
            int64_t other_stride, void* y, int64_t n, int64_t out, int64_t in, int then,
            int widened) {
    const Call call{x,  weight, other, (bf16*)y, x_stride, other_stride, out, in, Then(then),
                    widened ? (float*)y : nullptr};
#pragma omp parallel
    run(call, n);
}
}

#endif
