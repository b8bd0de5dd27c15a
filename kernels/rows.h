// What is done to one row by itself; see rms_norm.py and rotary.py. Never inlined, so that every
// file that has it adds in one order.

#pragma once

#include "numbers.h"

#if defined(__GNUC__)
#define ALONE __attribute__((noinline))
#else
#define ALONE
#endif

// y = x * r * w, r = 1 / sqrt(mean(x^2) + eps).
template <class T>
ALONE void norm_row(const T* __restrict in, const T* weight, T* __restrict out, int64_t size,
                    double eps) {
    wide<T> sum = 0;
    for (int64_t i = 0; i < size; i++) sum += widen(in[i]) * widen(in[i]);
    const wide<T> scale = 1 / std::sqrt(sum / size + wide<T>(eps));
    for (int64_t i = 0; i < size; i++) {
        T normed;  // rounded before the weight, as the definition does
        narrow(widen(in[i]) * scale, normed);
        narrow(widen(normed) * widen(weight[i]), out[i]);
    }
}

// x_i' = x_i cos_i + x_(i +- D/2) sin_i in place; half = D / 2, memory: 2 D wide numbers.
template <class T>
ALONE void rotate_head(T* x, const wide<T>* c, const wide<T>* s, int64_t half, wide<T>* memory) {
    const int64_t size = 2 * half;
    wide<T>*__restrict in = memory, *__restrict out = memory + size;
    for (int64_t i = 0; i < size; i++) in[i] = widen(x[i]);
#pragma omp simd
    for (int64_t i = 0; i < half; i++) out[i] = in[i] * c[i] + in[half + i] * s[i];
#pragma omp simd
    for (int64_t i = half; i < size; i++) out[i] = in[i] * c[i] + in[i - half] * s[i];
#pragma omp simd
    for (int64_t i = 0; i < size; i++) narrow(out[i], x[i]);
}
