// y = x * r * w, r = 1 / sqrt(mean(x^2) + eps); see rms_norm.py.

#include "numbers.h"

template <class T>
static void run(const T* x, int64_t stride, const T* weight, T* y, int64_t n, int64_t size,
                double eps) {
#pragma omp parallel for schedule(static) if (n * size > 65536)
    for (int64_t row = 0; row < n; row++) {
        const T* __restrict in = x + row * stride;
        T* __restrict out = y + row * size;
        wide<T> sum = 0;
        for (int64_t i = 0; i < size; i++) sum += widen(in[i]) * widen(in[i]);
        const wide<T> scale = 1 / std::sqrt(sum / size + wide<T>(eps));
        for (int64_t i = 0; i < size; i++) {
            T normed;  // rounded before the weight, as the definition does
            narrow(widen(in[i]) * scale, normed);
            narrow(widen(normed) * widen(weight[i]), out[i]);
        }
    }
}

extern "C" void rms_norm(int type, const void* x, int64_t stride, const void* weight, void* y,
                         int64_t n, int64_t size, double eps) {
#define CALL(T) run((const T*)x, stride, (const T*)weight, (T*)y, n, size, eps)
    BY_TYPE(type, CALL)
}
