// How the C++ forms read and write: sums in float32 (float64 for float64 tensors), bfloat16 rounded
// to the nearest, ties to even.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

struct bf16 {
    uint16_t bits;
};

template <class T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };
template <class T> using wide = typename Wide<T>::type;

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void narrow(double x, double& to) { to = x; }
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to.bits = x != x ? 0x7fc0 : rounded;  // NaN stays NaN
}

// exp for x <= 0 in a form that compilers turn into vectors; within 2 units of float32.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = std::rint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}
inline double exponential(double x) { return std::exp(x); }

#ifdef __AVX512F__

// Both for sixteen at once.
inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 exponential(__m512 x) {  // any x that float32 can hold the result of
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

#endif

// The three types in the order that Python counts them.
#define BY_TYPE(type, call)                     \
    if (type == 0) call(double);                \
    if (type == 1) call(float);                 \
    if (type == 2) call(bf16);
