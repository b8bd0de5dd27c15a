// Products y = x W^T in bfloat16 with float32 sums, for weights laid out once (see packed_linear.py),
// by all threads of the team that calls.
//
// The layout is that of the processor's matrix tiles: W^T in blocks of 32 k by 16 columns, 16 lines
// of (two k, 16 columns), two blocks side by side. A pass over few rows then reads the weights in
// one straight stream, once for all rows. Every row's sum runs over k in the same order, however
// many rows are beside it.

#pragma once

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PRODUCTS

#include <immintrin.h>
#include <omp.h>

#include <algorithm>

#include "tiles.h"

namespace product {

enum Then { NONE, SILU, MUL, ADD, GATE };

constexpr int64_t K = 32, COLUMNS = 16, BLOCK = K * COLUMNS, PAIR = 2 * BLOCK;
constexpr int64_t ROWS = 32;    // of a step: two tiles
constexpr int64_t PANEL = 256;  // rows of a task
constexpr int64_t NEAR = 1 << 19;  // bytes of weights that stay near while its rows pass by
constexpr int64_t AHEAD = 8;       // pairs of blocks that are fetched early

// x / (1 + 2^(-x log2(e))), within 3 units of float32 where e^-x is in its reach.
inline __m512 silu(__m512 x) {
    const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    const __m512 t = _mm512_min_ps(_mm512_set1_ps(115.0f), scaled);
    const __m512 f = _mm512_reduce_ps(t, 1);
    __m512 p = _mm512_set1_ps(0.00186713098f);
    for (float c : {0.00901702833f, 0.0557999146f, 0.24016445f, 0.693151312f, 1.0f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    const __m512 d = _mm512_add_ps(_mm512_scalef_ps(p, t), _mm512_set1_ps(1.0f));
    const __m512 r = _mm512_rcp14_ps(d);
    return _mm512_mul_ps(x, _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r));
}

struct Call {
    const bf16 *x, *weight, *other;
    bf16* y;
    int64_t x_stride, other_stride, out, in;  // out: columns of y, in: a multiple of K
    Then then;
    float* widened = nullptr;  // in place of y: the rounded result in float32

    // What follows the sums of one row: first and second are the pair's two blocks.
    void finish(int64_t row, int64_t pair, __m512 first, __m512 second) const {
        if (then == GATE) {
            store(row, pair * COLUMNS, _mm512_mul_ps(silu(first), second));
            return;
        }
        const __m512 sums[2] = {first, second};
        for (int64_t half = 0; half < 2; half++) {
            const int64_t column = pair * 2 * COLUMNS + half * COLUMNS;
            if (column >= out) return;
            __m512 sum = sums[half];
            if (then == SILU) sum = silu(sum);
            if (then == MUL || then == ADD) {
                const __m512 o = widen(_mm256_maskz_loadu_epi16(
                    inside(column), other + row * other_stride + column));
                sum = then == MUL ? _mm512_mul_ps(sum, o) : _mm512_add_ps(sum, o);
            }
            store(row, column, sum);
        }
    }

    __mmask16 inside(int64_t column) const {
        return column + COLUMNS <= out ? 0xffff : (1u << (out - column)) - 1;
    }

    void store(int64_t row, int64_t column, __m512 sum) const {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
        const int64_t at = row * out + column;
        if (widened)
            _mm512_mask_storeu_ps(widened + at, inside(column), widen(rounded));
        else
            _mm256_mask_storeu_epi16(y + at, inside(column), rounded);
    }
};

#ifdef __AMX_BF16__

// Sums 0 1 / 2 3, rows 4 / 5, weights 6 7.
inline void configure(int64_t first, int64_t second) {
    Tiles tiles;
    const int64_t rows[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) tiles.rows[tile] = rows[tile] ? rows[tile] : 16;
    tiles.load();
}

inline void fetch(const bf16* weight) {
    for (int64_t i = 0; i < PAIR; i += 32) _mm_prefetch(weight + AHEAD * PAIR + i, _MM_HINT_T0);
}

inline void step(const Call& c, int64_t pair, int64_t row, int64_t rows) {
    const bool first = row % PANEL == 0;  // later ones find the weights near
    alignas(64) float sums[ROWS][2 * COLUMNS];
    const bf16* weight = c.weight + pair * c.in / K * PAIR;
    const bf16* x = c.x + row * c.x_stride;
    const int64_t line = 2 * c.x_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < c.in; k += K, weight += PAIR) {
            if (first) fetch(weight);
            _tile_loadd(4, x + k, line);
            _tile_stream_loadd(6, weight, 64);  // leaves the nearest cache to x
            _tile_stream_loadd(7, weight + BLOCK, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, x + 16 * c.x_stride + k, line);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, &sums[16][0], sizeof sums[0]);
        _tile_stored(3, &sums[16][COLUMNS], sizeof sums[0]);
    } else {
        for (int64_t k = 0; k < c.in; k += K, weight += PAIR) {
            if (first) fetch(weight);
            _tile_loadd(4, x + k, line);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + BLOCK, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][COLUMNS], sizeof sums[0]);
    for (int64_t r = 0; r < rows; r++)
        c.finish(row + r, pair, _mm512_load_ps(sums[r]), _mm512_load_ps(sums[r] + COLUMNS));
}

#else

template <int R>
void lines(const Call& c, int64_t pair, int64_t row) {
    __m512 first[R], second[R];
    for (int r = 0; r < R; r++) first[r] = second[r] = _mm512_setzero_ps();
    const bf16* weight = c.weight + pair * c.in / K * PAIR;
    for (int64_t k = 0; k < c.in; k += 2, weight += 2 * COLUMNS) {
        if (k % K == 0 && k) weight += BLOCK;
        _mm_prefetch(weight + AHEAD * PAIR, _MM_HINT_T0);
        _mm_prefetch(weight + AHEAD * PAIR + BLOCK, _MM_HINT_T0);
        const __m512bh a = (__m512bh)_mm512_loadu_si512(weight);
        const __m512bh b = (__m512bh)_mm512_loadu_si512(weight + BLOCK);
        for (int r = 0; r < R; r++) {
            int32_t two;
            __builtin_memcpy(&two, c.x + (row + r) * c.x_stride + k, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(two);
            first[r] = _mm512_dpbf16_ps(first[r], x, a);
            second[r] = _mm512_dpbf16_ps(second[r], x, b);
        }
    }
    for (int r = 0; r < R; r++) c.finish(row + r, pair, first[r], second[r]);
}

inline void configure(int64_t, int64_t) {}

inline void step(const Call& c, int64_t pair, int64_t row, int64_t rows) {
    for (; rows >= 8; rows -= 8, row += 8) lines<8>(c, pair, row);
    for (; rows >= 4; rows -= 4, row += 4) lines<4>(c, pair, row);
    for (; rows; rows--, row++) lines<1>(c, pair, row);
}

#endif

// Rows top .. end - 1 against pairs left .. right - 1 whose weights stay near; x is read from the
// nearest cache, so the columns are the inner loop. `now`: the rows that the tiles are set to.
inline void panel(const Call& call, int64_t top, int64_t end, int64_t left, int64_t right,
                  int64_t& now) {
    for (int64_t row = top; row < end; row += ROWS) {
        const int64_t rows = std::min(ROWS, end - row);
        if (rows != now)
            configure(std::min<int64_t>(rows, 16), std::max<int64_t>(rows - 16, 0));
        now = rows;
        for (int64_t pair = left; pair < right; pair++) step(call, pair, row, rows);
    }
}

inline void release(int64_t now) {
#ifdef __AMX_BF16__
    if (now) _tile_release();
#endif
}

// Pairs in a row of the weights, and how many of them stay near.
inline int64_t pairs_of(const Call& call) {
    const int64_t own = call.then == GATE ? COLUMNS : 2 * COLUMNS;
    return (call.out + own - 1) / own;
}
inline int64_t near_of(const Call& call) {
    return std::max<int64_t>(1, NEAR / (call.in / K * PAIR * sizeof(bf16)));
}

// x [n, in] with in a multiple of 32 and unit stride -> y [n, out], contiguous. A task is a panel
// of rows against a panel of columns. All threads of a team call it and leave it together.
inline void run(const Call& call, int64_t n) {
    const int64_t pairs = pairs_of(call), near = near_of(call), threads = omp_get_num_threads();
    const int64_t share = (pairs + threads - 1) / threads;
    const int64_t cuts = n > ROWS ? (share + near - 1) / near : 1;  // of a thread's columns
    const int64_t wide = (share + cuts - 1) / cuts;
    int64_t now = 0;
#pragma omp for collapse(2) schedule(static)
    for (int64_t top = 0; top < n; top += PANEL)
        for (int64_t left = 0; left < pairs; left += wide)
            panel(call, top, std::min(n, top + PANEL), left, std::min(pairs, left + wide), now);
    release(now);
}

// The same for rows that one thread has for itself, of which x stays near.
inline void run_alone(const Call& call, int64_t n) {
    const int64_t pairs = pairs_of(call), near = near_of(call);
    int64_t now = 0;
    for (int64_t left = 0; left < pairs; left += near)
        panel(call, 0, n, left, std::min(pairs, left + near), now);
    release(now);
}

// Whether this processor runs it; asks for the matrix tiles where they are used.
inline bool granted() {
#ifdef __AMX_BF16__
    return tiles_granted();
#else
    return true;
#endif
}

}  // namespace product

#endif
