// y = x * r * w, r = 1 / sqrt(mean(x^2) + eps); see rms_norm.py.

#include "rows.h"

template <class T>
static void run(const T* x, int64_t stride, const T* weight, T* y, int64_t y_stride, int64_t n,
                int64_t size, double eps) {
#pragma omp parallel for schedule(static) if (n * size > 65536)
    for (int64_t row = 0; row < n; row++)
        norm_row(x + row * stride, weight, y + row * y_stride, size, eps);
}

extern "C" void rms_norm(int type, const void* x, int64_t stride, const void* weight, void* y,
                         int64_t y_stride, int64_t n, int64_t size, double eps) {
#define CALL(T) run((const T*)x, stride, (const T*)weight, (T*)y, y_stride, n, size, eps)
    BY_TYPE(type, CALL)
}

// dx = r * (g - n * mean(g * n)), g = dy * w; every thread adds up dw of its rows in `parts`.
template <class T>
static void pull(const T* x, const T* weight, const T* dy, T* dx, wide<T>* parts, int64_t n,
                 int64_t size, double eps, int64_t num_parts) {
#pragma omp parallel for schedule(static) if (n * size > 65536)
    for (int64_t part = 0; part < num_parts; part++) {
        wide<T>* __restrict dw = parts + part * size;
        for (int64_t i = 0; i < size; i++) dw[i] = 0;
        for (int64_t row = part; row < n; row += num_parts) {
            const T* __restrict in = x + row * size;
            const T* __restrict up = dy + row * size;
            T* __restrict out = dx + row * size;
            wide<T> square = 0, dot = 0;
            for (int64_t i = 0; i < size; i++) {
                const wide<T> value = widen(in[i]);
                square += value * value;
                dot += value * widen(up[i]) * widen(weight[i]);
            }
            const wide<T> scale = 1 / std::sqrt(square / size + wide<T>(eps));
            const wide<T> mean = dot * scale / size;
            for (int64_t i = 0; i < size; i++) {
                const wide<T> normed = widen(in[i]) * scale, slope = widen(up[i]);
                dw[i] += slope * normed;
                narrow(scale * (slope * widen(weight[i]) - normed * mean), out[i]);
            }
        }
    }
}

extern "C" void rms_norm_backward(int type, const void* x, const void* weight, const void* dy,
                                  void* dx, void* parts, int64_t n, int64_t size, double eps,
                                  int64_t num_parts) {
#define PULL(T)                                                                               \
    pull((const T*)x, (const T*)weight, (const T*)dy, (T*)dx, (wide<T>*)parts, n, size, eps,  \
         num_parts)
    BY_TYPE(type, PULL)
}
