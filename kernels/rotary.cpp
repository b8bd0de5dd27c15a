// x_i' = x_i cos_i + x_(i +- D/2) sin_i in place; see rotary.py.

#include "numbers.h"

template <class T>
static void run(T* x, int64_t row_stride, int64_t head_stride, const T* cos, int64_t cos_stride,
                const T* sin, int64_t sin_stride, int64_t n, int64_t heads, int64_t size) {
    const int64_t half = size / 2;
#pragma omp parallel for schedule(static) if (n * heads * size > 65536)
    for (int64_t row = 0; row < n; row++)
        for (int64_t head = 0; head < heads; head++) {
            T *low = x + row * row_stride + head * head_stride, *high = low + half;
            const T *c = cos + row * cos_stride, *s = sin + row * sin_stride;
            for (int64_t i = 0; i < half; i++) {
                const wide<T> a = widen(low[i]), b = widen(high[i]);
                narrow(a * widen(c[i]) + b * widen(s[i]), low[i]);
                narrow(b * widen(c[half + i]) + a * widen(s[half + i]), high[i]);
            }
        }
}

extern "C" void rotate(int type, void* x, int64_t row_stride, int64_t head_stride, const void* cos,
                       int64_t cos_stride, const void* sin, int64_t sin_stride, int64_t n,
                       int64_t heads, int64_t size) {
#define CALL(T)                                                                             \
    run((T*)x, row_stride, head_stride, (const T*)cos, cos_stride, (const T*)sin, sin_stride, n, \
        heads, size)
    BY_TYPE(type, CALL)
}
