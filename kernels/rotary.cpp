// x_i' = x_i cos_i + x_(i +- D/2) sin_i in place; see rotary.py.

#include <vector>

#include "rows.h"

template <class T>
static void run(T* x, int64_t row_stride, int64_t head_stride, const T* cos, int64_t cos_stride,
                const T* sin, int64_t sin_stride, int64_t n, int64_t heads, int64_t size) {
    using W = wide<T>;
#pragma omp parallel if (n * heads * size > 65536)
    {
        std::vector<W> memory(4 * size);
        W *c = memory.data(), *s = c + size, *own = s + size;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++) {
            for (int64_t i = 0; i < size; i++) c[i] = widen(cos[row * cos_stride + i]);
            for (int64_t i = 0; i < size; i++) s[i] = widen(sin[row * sin_stride + i]);
            for (int64_t head = 0; head < heads; head++)
                rotate_head(x + row * row_stride + head * head_stride, c, s, size / 2, own);
        }
    }
}

extern "C" void rotate(int type, void* x, int64_t row_stride, int64_t head_stride, const void* cos,
                       int64_t cos_stride, const void* sin, int64_t sin_stride, int64_t n,
                       int64_t heads, int64_t size) {
#define CALL(T)                                                                                  \
    run((T*)x, row_stride, head_stride, (const T*)cos, cos_stride, (const T*)sin, sin_stride, n, \
        heads, size)
    BY_TYPE(type, CALL)
}
