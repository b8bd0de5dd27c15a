// Attention of a few rows a sequence over the pages; see few_rows.py. The query heads that
// share a key head, times the rows of the sequence, are lines that read each key once together.
// A line's sums run over its keys in order, whatever runs beside it.

#pragma once

#include <algorithm>
#include <vector>

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "numbers.h"

namespace attention {

struct Shape {
    const int64_t *starts, *lengths;
    const int32_t* pages;
    int64_t batch, table, page_size;  // table: page ids a sequence
    int64_t heads, key_heads, width, value_width;
    int64_t q_head, q_row, keys_head, keys_slot, values_head, values_slot;
    double scaling, softcap;  // softcap 0: none
    int64_t window, most;     // window 0: none; sequences of more rows are left out
};

// One sequence's rows of the heads that share a key head.
template <class T>
struct Task {
    const Shape& s;
    int64_t sequence, head, first, rows, length, group, lines, low, span;

    Task(const Shape& s, int64_t sequence, int64_t head)
        : s(s), sequence(sequence), head(head), first(s.starts[sequence]),
          rows(s.starts[sequence + 1] - first), length(s.lengths[sequence]),
          group(s.heads / s.key_heads), lines(rows * group),
          low(s.window ? std::max<int64_t>(0, length - rows + 1 - s.window) : 0),
          span(length - low) {}  // keys low .. length-1 are seen by one line or another

    int64_t slot(int64_t position) const {
        return int64_t(s.pages[sequence * s.table + position / s.page_size]) * s.page_size +
               position % s.page_size;
    }
    const T* query(const T* q, int64_t line) const {
        return q + (head * group + line % group) * s.q_head + (first + line / group) * s.q_row;
    }
    T* result(T* out, int64_t line) const {
        return out + ((first + line / group) * s.heads + head * group + line % group) * s.value_width;
    }

    // Scores of one line [span] -> weights in their place, before the division by their sum, which
    // is returned. Keys that the line does not see weigh nothing.
    template <class W>
    W weigh(W* __restrict scores, int64_t line) const {
        const int64_t end = span - rows + line / group + 1;
        const int64_t begin = s.window ? std::max<int64_t>(0, end - s.window) : 0;
        if (s.softcap != 0)
            for (int64_t j = begin; j < end; j++)
                scores[j] = W(s.softcap) * std::tanh(scores[j] / W(s.softcap));
        W top = scores[begin], mass = 0;
        for (int64_t j = begin; j < end; j++) top = scores[j] > top ? scores[j] : top;
        for (int64_t j = begin; j < end; j++) scores[j] = exponential(scores[j] - top);
        for (int64_t j = begin; j < end; j++) mass += scores[j];
        std::fill(scores, scores + begin, W(0));
        std::fill(scores + end, scores + span, W(0));
        return mass;
    }
};

// D: the width where it is known when this is compiled, else 0.
template <class T, int D>
void one(const Task<T>& t, const T* q, const T* keys, const T* values, T* out,
         std::vector<wide<T>>& memory) {
    using W = wide<T>;
    const Shape& s = t.s;
    const int64_t width = D ? D : s.width, out_width = D ? D : s.value_width, span = t.span;
    memory.resize(t.lines * (width + span + out_width + 1) + std::max(width, out_width));
    W *query = memory.data(), *scores = query + t.lines * width, *sums = scores + t.lines * span;
    W *mass = sums + t.lines * out_width, *__restrict row = mass + t.lines;
    for (int64_t line = 0; line < t.lines; line++) {
        const T* from = t.query(q, line);
        for (int64_t i = 0; i < width; i++) query[line * width + i] = widen(from[i]) * W(s.scaling);
    }
    for (int64_t j = 0; j < span; j++) {
        const T* key = keys + t.head * s.keys_head + t.slot(t.low + j) * s.keys_slot;
        for (int64_t i = 0; i < width; i++) row[i] = widen(key[i]);
        for (int64_t line = 0; line < t.lines; line++) {
            const W* mine = query + line * width;
            W dot = 0;
            for (int64_t i = 0; i < width; i++) dot += mine[i] * row[i];
            scores[line * span + j] = dot;
        }
    }
    for (int64_t line = 0; line < t.lines; line++) mass[line] = t.weigh(scores + line * span, line);
    std::fill(sums, sums + t.lines * out_width, W(0));
    for (int64_t j = 0; j < span; j++) {
        const T* value = values + t.head * s.values_head + t.slot(t.low + j) * s.values_slot;
        for (int64_t i = 0; i < out_width; i++) row[i] = widen(value[i]);
        for (int64_t line = 0; line < t.lines; line++) {
            const W weight = scores[line * span + j];
            W* __restrict mine = sums + line * out_width;
            for (int64_t i = 0; i < out_width; i++) mine[i] += weight * row[i];
        }
    }
    for (int64_t line = 0; line < t.lines; line++) {
        T* to = t.result(out, line);
        for (int64_t i = 0; i < out_width; i++)
            narrow(sums[line * out_width + i] / mass[line], to[i]);
    }
}

#ifdef __AMX_BF16__

constexpr int64_t LINES = 16, CHUNK = 64, KEYS = 64;

struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Rows {
    const bf16* at;
    int64_t stride;  // between rows
};

// 16 rows of a pool from a position that is a multiple of 16 on; rows that no line sees are zero.
struct Pool {
    const Task<bf16>& t;
    const bf16* base;
    int64_t slot_stride, width;
    bool whole;  // 16 rows lie in one page

    Rows rows(int64_t at, bf16* scratch) const {
        if (whole && at >= t.low && at + 16 <= t.length)
            return {base + t.slot(at) * slot_stride, slot_stride};
        for (int64_t j = 0; j < 16; j++) {
            if (at + j >= t.low && at + j < t.length)
                std::memcpy(scratch + j * width, base + t.slot(at + j) * slot_stride, 2 * width);
            else
                std::memset(scratch + j * width, 0, 2 * width);
        }
        return {scratch, width};
    }

    void fetch(int64_t at) const {
        if (!whole || at >= t.length) return;
        const bf16* from = base + t.slot(at) * slot_stride;
        for (int64_t j = 0; j < 16; j++)
            for (int64_t i = 0; i < width; i += 32)
                _mm_prefetch(from + j * slot_stride + i, _MM_HINT_T1);
    }
};

// The same in matrix tiles, widths multiples of 64: scores of 64 keys by 16 lines at a time; the
// weights are rounded to bfloat16 before they meet the values.
inline void tiled(const Task<bf16>& t, const bf16* q, const bf16* keys, const bf16* values, bf16* out,
           std::vector<float>& memory) {
    const Shape& s = t.s;
    const int64_t skipped = t.low % 16, start = t.low - skipped;
    const int64_t wide = (t.length - start + KEYS - 1) / KEYS * KEYS;
    const bool whole = s.page_size % 16 == 0;
    const Pool key_pool{t, keys + t.head * s.keys_head, s.keys_slot, s.width, whole};
    const Pool value_pool{t, values + t.head * s.values_head, s.values_slot, s.value_width, whole};
    const int64_t most = std::max(s.width, s.value_width);
    memory.resize(LINES * wide * 3 / 2 + LINES * s.width / 2 + 4 * 16 * most / 2);
    float* scores = memory.data();
    bf16* weights = (bf16*)(scores + LINES * wide);
    bf16* turned = weights + LINES * wide;  // queries as [k / 32][pairs of k][lines][2]
    bf16* scratch = turned + LINES * s.width;
    alignas(64) float square[KEYS][LINES];
    alignas(64) bf16 packed[4][16][32];
    float mass[LINES];
    const __m512i stride = _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64,
                                            48, 32, 16, 0);
    const __m512i even =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    static const Tiles tiles;
    _tile_loadconfig(&tiles);
    for (int64_t top = 0; top < t.lines; top += LINES) {
        const int64_t lines = std::min(LINES, t.lines - top);
        for (int64_t line = 0; line < LINES; line++)
            for (int64_t i = 0; i < s.width; i++)
                turned[i / 2 * 32 + 2 * line + i % 2] =
                    line < lines ? t.query(q, top + line)[i] : bf16{0};
        for (int64_t j = 0; j < wide; j += KEYS) {
            Rows block[4];
            for (int64_t b = 0; b < 4; b++) {
                key_pool.fetch(start + j + KEYS + 16 * b);
                value_pool.fetch(start + j + 16 * b);
                block[b] = key_pool.rows(start + j + 16 * b, scratch + b * 16 * most);
            }
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < s.width; k += 32) {
                _tile_loadd(4, turned + k * 16, 64);
                _tile_loadd(5, block[0].at + k, 2 * block[0].stride);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, block[1].at + k, 2 * block[1].stride);
                _tile_dpbf16ps(1, 6, 4);
                _tile_loadd(7, block[2].at + k, 2 * block[2].stride);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, block[3].at + k, 2 * block[3].stride);
                _tile_dpbf16ps(3, 5, 4);
            }
            _tile_stored(0, square[0], 64);
            _tile_stored(1, square[16], 64);
            _tile_stored(2, square[32], 64);
            _tile_stored(3, square[48], 64);
            for (int64_t b = 0; b < 4; b++)
                for (int64_t line = 0; line < lines; line++)
                    _mm512_storeu_ps(
                        scores + line * wide + j + 16 * b,
                        _mm512_mul_ps(_mm512_i32gather_ps(stride, square[16 * b] + line, 4),
                                      _mm512_set1_ps(float(s.scaling))));
        }
        for (int64_t line = 0; line < lines; line++) {
            float* mine = scores + line * wide;
            mass[line] = t.weigh(mine + skipped, top + line);
            std::fill(mine, mine + skipped, 0.0f);
            std::fill(mine + t.length - start, mine + wide, 0.0f);
            for (int64_t j = 0; j < wide; j += 16)
                _mm256_storeu_si256((__m256i*)(weights + line * wide + j),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(mine + j)));
        }
        for (int64_t column = 0; column < s.value_width; column += CHUNK) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t j = 0; j < wide; j += 32) {
                for (int64_t half = 0; half < 2; half++) {
                    const Rows rows = value_pool.rows(start + j + 16 * half, scratch);
                    for (int64_t pair = 0; pair < 8; pair++)
                        for (int64_t i = 0; i < 2; i++) {
                            const bf16* from = rows.at + 2 * pair * rows.stride + column + 32 * i;
                            const __m512i a = _mm512_loadu_si512(from);
                            const __m512i b = _mm512_loadu_si512(from + rows.stride);
                            _mm512_store_si512(packed[2 * i][8 * half + pair],
                                               _mm512_permutex2var_epi16(a, even, b));
                            _mm512_store_si512(packed[2 * i + 1][8 * half + pair],
                                               _mm512_permutex2var_epi16(a, odd, b));
                        }
                }
                _tile_loadd(4, weights + j, 2 * wide);  // lines that are not there: not looked at
                _tile_loadd(5, packed[0], 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, packed[1], 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(7, packed[2], 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, packed[3], 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            alignas(64) float sums[LINES][CHUNK];
            _tile_stored(0, &sums[0][0], sizeof sums[0]);
            _tile_stored(1, &sums[0][16], sizeof sums[0]);
            _tile_stored(2, &sums[0][32], sizeof sums[0]);
            _tile_stored(3, &sums[0][48], sizeof sums[0]);
            for (int64_t line = 0; line < lines; line++) {
                bf16* to = t.result(out, top + line) + column;
                const float share = 1 / mass[line];
                for (int64_t i = 0; i < CHUNK; i++) narrow(sums[line][i] * share, to[i]);
            }
        }
    }
    _tile_release();
}

inline bool can_tile() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // XTILEDATA
    return granted;
}

inline bool in_tiles(const Task<bf16>& t, const bf16* q, const bf16* keys, const bf16* values, bf16* out,
              std::vector<float>& memory) {
    if (t.s.width % CHUNK || t.s.value_width % CHUNK || !can_tile()) return false;
    tiled(t, q, keys, values, out, memory);
    return true;
}

#endif

template <class T>
bool in_tiles(const Task<T>&, const T*, const T*, const T*, T*, std::vector<wide<T>>&) {
    return false;
}

// One sequence's rows of the heads that share a key head.
template <class T>
void attend(const Task<T>& task, const T* q, const T* keys, const T* values, T* out,
            std::vector<wide<T>>& memory) {
    const Shape& s = task.s;
    if (in_tiles(task, q, keys, values, out, memory)) return;
    if (s.width == 64 && s.value_width == 64)
        one<T, 64>(task, q, keys, values, out, memory);
    else if (s.width == 128 && s.value_width == 128)
        one<T, 128>(task, q, keys, values, out, memory);
    else
        one<T, 0>(task, q, keys, values, out, memory);
}

}  // namespace attention
