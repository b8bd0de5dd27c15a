// Causal attention of whole rows in matrix tiles; see causal_attention.py. Keys and values are laid
// out for the tiles; then 32 queries of a head meet 256 keys at a time, with a running maximum.
// A query's sums run over its keys in order from its document's first, whatever runs beside it.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "tiles.h"

struct Call {
    const bf16 *q, *k, *v;
    bf16* out;               // [N, heads, value_width]
    const int64_t* borders;  // of the documents' queries; their keys are the same rows and `past` more
    int64_t documents, past, heads, key_heads, width, value_width;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row, window;  // window 0: none
    double scaling;
};

#ifndef __AMX_BF16__

extern "C" {
int usable() { return 0; }
void attend(const Call*) {}
}

#else

namespace {

constexpr int64_t TILE = 16, BLOCK = 32, KEYS = 256;
constexpr int64_t MANY = 512, FEW = 128;  // queries of a task, for which the keys are laid out anew
constexpr int64_t SCORES = KEYS + 16, WEIGHTS = KEYS + 32;  // strides that spread over the cache

struct alignas(64) Line {
    bf16 at[32];
};

struct Document {
    int64_t first, rows, keys;
};

// One block of keys of a head as [16 keys][32 of D][pairs][key][2], of values as [32 keys][16 of Dv][pairs][column][2].
void pack(const Call& c, const Document& d, int64_t head, int64_t block, bf16* keys, bf16* values) {
    const int64_t begin = block * BLOCK, count = std::min(BLOCK, d.keys - begin);
    const bf16* key = c.k + head * c.k_head + (d.first + begin) * c.k_row;
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i places = _mm512_mullo_epi32(lane, _mm512_set1_epi32(int(2 * c.k_row)));
    for (int64_t j = 0; j < BLOCK; j += TILE) {
        const __mmask16 there = count - j >= TILE ? 0xffff : (1 << std::max<int64_t>(0, count - j)) - 1;
        for (int64_t i = 0; i < c.width; i += 2)
            _mm512_store_si512(keys + j * c.width + i * TILE,
                               _mm512_mask_i32gather_epi32(__m512i{}, there, places,
                                                           key + j * c.k_row + i, 1));
    }
    const bf16* value = c.v + head * c.v_head + (d.first + begin) * c.v_row;
    const __m512i low =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < c.value_width; i += 32)
        for (int64_t j = 0; j < BLOCK; j += 2) {
            const bf16* from = value + j * c.v_row + i;
            const __m512i a = j < count ? _mm512_loadu_si512(from) : __m512i{};
            const __m512i b = j + 1 < count ? _mm512_loadu_si512(from + c.v_row) : __m512i{};
            bf16* to = values + i * BLOCK + j * TILE;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(to + TILE * BLOCK, _mm512_permutex2var_epi16(a, high, b));
        }
}

// What a thread works in.
struct Desk {
    alignas(64) float scores[BLOCK][SCORES];
    alignas(64) bf16 weights[BLOCK][WEIGHTS];
    float top[BLOCK], mass[BLOCK];
    std::vector<Line> query, sums;
};

// 2^x; the relative error of 4e-6 is nothing beside the rounding of a weight.
inline __m512 power(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x)
    __m512 p = _mm512_set1_ps(0.0134266921f);
    for (float c : {0.052242461f, 0.241280211f, 0.693044844f, 1.0f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, x);
}

// Scores of a row against keys 0 .. 255 of which it sees begin .. end - 1, times log2(e) -> weights,
// zeros up to `wide`; what was summed before them shrinks by the factor that is returned.
float weigh(Desk& desk, int64_t row, int64_t begin, int64_t end, int64_t wide, float scaling) {
    const float* scores = desk.scores[row];
    bf16* weights = desk.weights[row];
    const auto inside = [&](int64_t j) {
        uint32_t mask = 0xffff;
        if (j < begin) mask &= mask << (begin - j);
        if (j + 16 > end) mask &= 0xffff >> (j + 16 - end);
        return __mmask16(mask);
    };
    const int64_t first = begin / 16 * 16;
    __m512 best = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = first; j < end; j += 16)
        best = _mm512_mask_max_ps(best, inside(j), best, _mm512_load_ps(scores + j));
    const float before = desk.top[row];
    const float top = std::max(before, scaling * _mm512_reduce_max_ps(best));
    const __m512 shift = _mm512_set1_ps(top), factor = _mm512_set1_ps(scaling);
    int64_t j = 0;
    for (; j < first; j += 16) _mm256_store_si256((__m256i*)(weights + j), __m256i{});
    for (; j < end; j += 16) {
        const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(scores + j), factor, shift);
        const __m512 e = _mm512_maskz_mov_ps(inside(j), power(x));
        sum = _mm512_add_ps(sum, e);
        _mm256_store_si256((__m256i*)(weights + j), (__m256i)_mm512_cvtneps_pbh(e));
    }
    for (; j < wide; j += 16) _mm256_store_si256((__m256i*)(weights + j), __m256i{});
    const float shrink = before == top ? 1 : before == -INFINITY ? 0 : std::exp2(before - top);
    desk.top[row] = top;
    desk.mass[row] = desk.mass[row] * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

void attend_block(const Call& c, const Document& d, int64_t head, int64_t start, const bf16* keys,
                  const bf16* values, Desk& desk) {
    const int64_t rows = std::min(BLOCK, d.rows - start), first = d.first + start;
    const int64_t ahead = d.keys - d.rows + start;  // keys before the first row's own
    bf16* query = desk.query[0].at;
    float* sums = (float*)desk.sums.data();
    for (int64_t row = 0; row < BLOCK; row++) {
        const bf16* from = c.q + head * c.q_head + (first + row) * c.q_row;
        for (int64_t i = 0; i < c.width; i += 32)
            _mm512_store_si512(query + row * c.width + i,
                               row < rows ? _mm512_loadu_si512(from + i) : __m512i{});
        desk.top[row] = -INFINITY;
        desk.mass[row] = 0;
    }
    std::fill(sums, sums + BLOCK * c.value_width, 0.0f);
    const int64_t oldest = c.window ? std::max<int64_t>(0, ahead + 1 - c.window) : 0;
    for (int64_t base = oldest / KEYS * KEYS; base < ahead + rows; base += KEYS) {
        const int64_t wide = (std::min(KEYS, ahead + rows - base) + BLOCK - 1) / BLOCK * BLOCK;
        for (int64_t j = 0; j < wide; j += BLOCK) {
            const bf16* key = keys + (base + j) * c.width;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < c.width; i += 32) {
                _tile_loadd(4, query + i, 2 * c.width);
                _tile_stream_loadd(6, key + i * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_stream_loadd(7, key + (c.width + i) * TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, query + TILE * c.width + i, 2 * c.width);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, &desk.scores[0][j], 4 * SCORES);
            _tile_stored(1, &desk.scores[0][j + TILE], 4 * SCORES);
            _tile_stored(2, &desk.scores[TILE][j], 4 * SCORES);
            _tile_stored(3, &desk.scores[TILE][j + TILE], 4 * SCORES);
        }
        for (int64_t row = 0; row < BLOCK; row++) {
            const int64_t own = row < rows ? ahead + row + 1 - base : 0, end = std::min(KEYS, own);
            const int64_t begin = c.window ? std::max<int64_t>(0, own - c.window) : 0;
            const float shrink = weigh(desk, row, std::min(begin, std::max<int64_t>(0, end)), end,
                                       wide, float(c.scaling * 1.4426950408889634));
            float* mine = sums + row * c.value_width;
            if (shrink != 1)
                for (int64_t i = 0; i < c.value_width; i++) mine[i] *= shrink;
        }
        for (int64_t i = 0; i < c.value_width; i += BLOCK) {
            const int64_t line = 4 * c.value_width, lower = TILE * c.value_width;
            _tile_loadd(0, sums + i, line);
            _tile_loadd(1, sums + i + TILE, line);
            _tile_loadd(2, sums + lower + i, line);
            _tile_loadd(3, sums + lower + i + TILE, line);
            for (int64_t j = 0; j < wide; j += BLOCK) {
                const bf16* value = values + (base + j) * c.value_width + i * BLOCK;
                _tile_loadd(4, &desk.weights[0][j], 2 * WEIGHTS);
                _tile_stream_loadd(6, value, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_stream_loadd(7, value + TILE * BLOCK, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, &desk.weights[TILE][j], 2 * WEIGHTS);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sums + i, line);
            _tile_stored(1, sums + i + TILE, line);
            _tile_stored(2, sums + lower + i, line);
            _tile_stored(3, sums + lower + i + TILE, line);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        bf16* to = c.out + ((first + row) * c.heads + head) * c.value_width;
        const float share = 1 / desk.mass[row];
        for (int64_t i = 0; i < c.value_width; i++) narrow(sums[row * c.value_width + i] * share, to[i]);
    }
}

// Queries start .. end - 1 of a document, of the heads that share a key head.
struct Task {
    Document document;
    int64_t head, start, end;
};

}  // namespace

extern "C" {

int usable() { return tiles_granted(); }

void attend(const Call* call) {
    const Call& c = *call;
    const int64_t group = c.heads / c.key_heads;
    const bool many = c.borders[c.documents] * c.key_heads >= 4 * FEW * omp_get_max_threads();
    std::vector<Task> tasks;
    for (int64_t i = 0; i < c.documents; i++) {
        const int64_t first = c.borders[i], rows = c.borders[i + 1] - first;
        for (int64_t head = 0; head < c.key_heads; head++)
            for (int64_t start = 0, end; start < rows; start = end) {
                end = std::min(rows, start + (many ? MANY : FEW));
                tasks.push_back({{first, rows, rows + c.past}, head, start, end});
            }
    }
#pragma omp parallel
    {
        Desk desk;
        desk.query.resize(c.width);
        desk.sums.resize(2 * c.value_width);
        std::vector<Line> keys, values;
        Tiles tiles;
        tiles.load();
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < tasks.size(); i++) {
            const Task& t = tasks[i];
            const Document& d = t.document;
            const int64_t before = d.keys - d.rows;
            const int64_t oldest = c.window ? std::max<int64_t>(0, before + t.start + 1 - c.window) : 0;
            const int64_t begin = oldest / KEYS * KEYS / BLOCK;
            const int64_t blocks = (before + t.end + BLOCK - 1) / BLOCK - begin;
            keys.resize(std::max<size_t>(keys.size(), blocks * c.width));
            values.resize(std::max<size_t>(values.size(), blocks * c.value_width));
            for (int64_t block = 0; block < blocks; block++)
                pack(c, d, t.head, begin + block, keys[block * c.width].at,
                     values[block * c.value_width].at);
            // As if all keys before lay there, too.
            const bf16* key = keys[0].at - begin * BLOCK * c.width;
            const bf16* value = values[0].at - begin * BLOCK * c.value_width;
            for (int64_t start = t.start; start < t.end; start += BLOCK)
                for (int64_t head = t.head * group; head < (t.head + 1) * group; head++)
                    attend_block(c, d, head, start, key, value, desk);
        }
        _tile_release();
    }
}
}

#endif
