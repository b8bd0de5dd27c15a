// Attention of a few rows a sequence over the pages; see few_rows.py. The query heads that
// share a key head, times the rows of the sequence, are lines that read each key once together.
// A line's sums run over its keys in order, whatever runs beside it. The last keys of a sequence may be
// a drafted tree, of which a row sees its own path alone.

#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "tiles.h"

namespace attention {

struct Shape {
    const int64_t *starts, *lengths;
    const int32_t* pages;
    int64_t batch, table, page_size;  // table: page ids a sequence
    int64_t heads, key_heads, width, value_width;
    int64_t q_head, q_row, keys_head, keys_slot, values_head, values_slot;
    double scaling, softcap;  // softcap 0: none
    int64_t window, most;     // window 0: none; sequences of more rows are left out
    const int32_t* ancestry;  // [rows, tree_table] how far up a row's path each column of its tree
    const int64_t* columns;   // lies, 0 off it; [batch] columns. Null: every row sees all before it
    int64_t tree_table;
};

// One sequence's rows of the heads that share a key head.
template <class T>
struct Task {
    const Shape& s;
    int64_t sequence, head, first, rows, length, group, lines, tree, text, low, span;

    Task(const Shape& s, int64_t sequence, int64_t head)
        : s(s), sequence(sequence), head(head), first(s.starts[sequence]),
          rows(s.starts[sequence + 1] - first), length(s.lengths[sequence]),
          group(s.heads / s.key_heads), lines(rows * group),
          tree(s.ancestry ? s.columns[sequence] : 0), text(length - tree),  // keys before the tree
          low(s.window ? std::max<int64_t>(0, (tree ? text : length - rows) + 1 - s.window) : 0),
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

    // The keys begin .. end - 1 that a line sees, but for the columns of a tree that `hide` hides.
    struct Sight {
        int64_t begin, end;
    };
    Sight sight(int64_t line) const {
        const int64_t end = tree ? length : length - rows + line / group + 1;
        if (!s.window) return {low, end};
        const int32_t* up = path(line);
        const int64_t own = tree ? text + *std::max_element(up, up + tree) : end;
        return {std::max(low, own - s.window), end};
    }
    const int32_t* path(int64_t line) const {
        return s.ancestry + (first + line / group) * s.tree_table;
    }

    // `nothing` for the columns of the tree off a line's path; scores are those of keys from `start`
    // on.
    template <class W>
    void hide(W* scores, int64_t start, int64_t line, W nothing) const {
        if (!tree) return;
        const int32_t* up = path(line);
        for (int64_t j = 0; j < tree; j++)
            if (up[j] == 0 || (s.window && up[j] > s.window)) scores[text - start + j] = nothing;
    }

    // Scores of one line [span] -> weights in their place, before the division by their sum, which
    // is returned. Keys that the line does not see weigh nothing.
    template <class W>
    W weigh(W* __restrict scores, int64_t line) const {
        const Sight seen = sight(line);
        const int64_t begin = seen.begin - low, end = seen.end - low;
        if (s.softcap != 0)
            for (int64_t j = begin; j < end; j++)
                scores[j] = W(s.softcap) * std::tanh(scores[j] / W(s.softcap));
        hide(scores, low, line, -W(INFINITY));
        W top = scores[begin], mass = 0;
        for (int64_t j = begin; j < end; j++) top = scores[j] > top ? scores[j] : top;
        for (int64_t j = begin; j < end; j++) scores[j] = exponential(scores[j] - top);
        hide(scores, low, line, W(0));
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

constexpr int64_t LINES = 16, CHUNK = 64, BLOCK = 16, KEYS = 4 * BLOCK, AHEAD = 2 * KEYS;

struct Rows {
    const bf16* at;
    int64_t stride;  // between rows
};

// A head's rows of a pool, in blocks of 16 positions from a multiple of 16 on.
struct Pool {
    const Task<bf16>& t;
    const bf16* base;
    int64_t slot_stride, width, start, blocks;
    const int64_t* slots;  // of each block's first row, where a page holds whole blocks; or null

    // `exact`: rows that no line sees are zero, whatever lies in the pool.
    Rows block(int64_t b, bool exact, bf16* scratch) const {
        const int64_t at = start + b * BLOCK;
        const bool inside = at >= t.low && at + BLOCK <= t.length;
        if (slots && b < blocks && (inside || !exact))
            return {base + slots[b] * slot_stride, slot_stride};
        for (int64_t j = 0; j < BLOCK; j++) {
            if (at + j >= t.low && at + j < t.length)
                std::memcpy(scratch + j * width, base + t.slot(at + j) * slot_stride, 2 * width);
            else
                std::memset(scratch + j * width, 0, 2 * width);
        }
        return {scratch, width};
    }

    // Keys `first` .. `end` - 1, of the head `later` heads behind this one.
    void fetch(int64_t first, int64_t end, int64_t later = 0) const {
        if (!slots) return;
        for (int64_t b = first / BLOCK; b < std::min(blocks, end / BLOCK); b++) {
            const bf16* from = base + later + slots[b] * slot_stride;
            for (int64_t j = 0; j < BLOCK; j++)
                for (int64_t i = 0; i < width; i += 32)
                    _mm_prefetch(from + j * slot_stride + i, _MM_HINT_T1);
        }
    }
};

// Scores of 16 keys by 16 lines -> those of lines `line` .. `line` + 3 by key, times `scaling`.
inline void turn(const float (*square)[LINES], int64_t line, __m512 scaling, __m512 out[4]) {
    __m512 part[4];
    for (int64_t k = 0; k < 4; k++) {  // keys k, k + 4, k + 8, k + 12
        part[k] = _mm512_castps128_ps512(_mm_load_ps(&square[k][line]));
        part[k] = _mm512_insertf32x4(part[k], _mm_load_ps(&square[k + 4][line]), 1);
        part[k] = _mm512_insertf32x4(part[k], _mm_load_ps(&square[k + 8][line]), 2);
        part[k] = _mm512_insertf32x4(part[k], _mm_load_ps(&square[k + 12][line]), 3);
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(part[0], part[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(part[2], part[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(part[0], part[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(part[2], part[3]));
    out[0] = _mm512_mul_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), scaling);
    out[1] = _mm512_mul_ps(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)), scaling);
    out[2] = _mm512_mul_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), scaling);
    out[3] = _mm512_mul_ps(_mm512_castpd_ps(_mm512_unpackhi_pd(c, d)), scaling);
}

// Scores [wide] of a line that sees begin .. end - 1 (-infinity: it does not) -> weights in bfloat16,
// before the division by their sum, which is returned. A lane adds every sixteenth key, wherever the
// line begins.
inline float weigh(const float* scores, int64_t begin, int64_t end, int64_t wide, bf16* weights) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const auto inside = [&](int64_t j) {
        const int64_t from = std::max<int64_t>(0, begin - j), to = std::min<int64_t>(16, end - j);
        return from < to ? __mmask16((1u << to) - (1u << from)) : __mmask16(0);
    };
    __m512 best = nothing, sum = _mm512_setzero_ps();
    for (int64_t j = begin / 16 * 16; j < end; j += 16)
        best = _mm512_max_ps(best, _mm512_mask_loadu_ps(nothing, inside(j), scores + j));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    for (int64_t j = 0; j < wide; j += 16) {
        __mmask16 mask = inside(j);
        const __m512 score = _mm512_maskz_loadu_ps(mask, scores + j);
        mask = _mm512_mask_cmp_ps_mask(mask, score, nothing, _CMP_NEQ_UQ);
        const __m512 x = _mm512_sub_ps(score, top);
        const __m512 e = exponential(_mm512_max_ps(_mm512_set1_ps(-87.0f), x));  // NaN stays
        const __m512 weight = _mm512_maskz_mov_ps(mask, e);
        sum = _mm512_add_ps(sum, weight);
        _mm256_storeu_si256((__m256i*)(weights + j), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    return _mm512_reduce_add_ps(sum);
}

// The same in matrix tiles, widths multiples of 64: scores of 64 keys by 16 lines at a time; the
// weights are rounded to bfloat16 before they meet the values.
inline void tiled(const Task<bf16>& t, const bf16* q, const bf16* keys, const bf16* values,
                  bf16* out, std::vector<float>& memory) {
    const Shape& s = t.s;
    const int64_t skipped = t.low % BLOCK, start = t.low - skipped, seen = t.length - start;
    const int64_t wide = (seen + KEYS - 1) / KEYS * KEYS, blocks = (seen + BLOCK - 1) / BLOCK;
    const int64_t most = std::max(s.width, s.value_width);
    memory.resize(2 * wide + LINES * wide * 3 / 2 + LINES * s.width / 2 + 4 * BLOCK * most / 2);
    int64_t* slots = (int64_t*)memory.data();
    float* scores = memory.data() + 2 * wide;
    bf16* weights = (bf16*)(scores + LINES * wide);
    bf16* turned = weights + LINES * wide;  // queries as [k / 32][pairs of k][lines][2]
    bf16* scratch = turned + LINES * s.width;
    const bool whole = s.page_size % BLOCK == 0;
    for (int64_t b = 0; whole && b < blocks; b++) slots[b] = t.slot(start + b * BLOCK);
    const Pool key_pool{t,     keys + t.head * s.keys_head, s.keys_slot, s.width, start, blocks,
                        whole ? slots : nullptr};
    const Pool value_pool{t,     values + t.head * s.values_head, s.values_slot, s.value_width, start,
                          blocks, whole ? slots : nullptr};
    key_pool.fetch(0, AHEAD);
    alignas(64) float square[KEYS][LINES];
    alignas(64) bf16 packed[4][16][32];
    float mass[LINES];
    const __m512 scaling = _mm512_set1_ps(float(s.scaling));
    const __m512i even =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    for (int64_t top = 0; top < t.lines; top += LINES) {
        const int64_t lines = std::min(LINES, t.lines - top);
        Tiles tiles;
        tiles.load();
        std::memset(turned, 0, 2 * LINES * s.width);
        for (int64_t line = 0; line < lines; line++) {
            const bf16* from = t.query(q, top + line);
            for (int64_t i = 0; i < s.width; i += 2)
                std::memcpy(turned + i * LINES + 2 * line, from + i, 4);
        }
        for (int64_t j = 0; j < wide; j += KEYS) {
            if (top == 0) key_pool.fetch(j + AHEAD, j + AHEAD + KEYS);
            if (top == 0) value_pool.fetch(j, j + KEYS);
            Rows block[4];
            for (int64_t b = 0; b < 4; b++)
                block[b] = key_pool.block(std::min(j / BLOCK + b, blocks - 1), false,
                                          scratch + b * BLOCK * most);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < s.width; k += 32) {
                _tile_loadd(4, turned + k * LINES, 64);
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
            for (int64_t b = 0; b < KEYS; b += BLOCK)
                for (int64_t line = 0; line < lines; line += 4) {
                    __m512 four[4];
                    turn(square + b, line, scaling, four);
                    for (int64_t i = 0; i < std::min<int64_t>(4, lines - line); i++)
                        _mm512_storeu_ps(scores + (line + i) * wide + j + b, four[i]);
                }
        }
        for (int64_t line = 0; line < lines; line++) {
            float* mine = scores + line * wide;
            const auto sight = t.sight(top + line);
            const int64_t begin = sight.begin - start, end = sight.end - start;
            if (s.softcap != 0)
                for (int64_t j = begin; j < end; j++)
                    mine[j] = float(s.softcap) * std::tanh(mine[j] / float(s.softcap));
            t.hide(mine, start, top + line, -INFINITY);
            mass[line] = weigh(mine, begin, end, wide, weights + line * wide);
        }
        for (int tile = 0; tile < 5; tile++) tiles.rows[tile] = lines;
        tiles.load();
        const bool more = t.head + 1 < s.key_heads && top + LINES >= t.lines;
        for (int64_t column = 0; column < s.value_width; column += CHUNK) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t j = 0; j < seen; j += 32) {
                if (more && j < AHEAD) key_pool.fetch(j, j + 32, s.keys_head);  // this thread's next
                for (int64_t half = 0; half < 2; half++) {
                    const Rows rows = value_pool.block(j / BLOCK + half, true, scratch);
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
                _tile_loadd(4, weights + j, 2 * wide);
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

inline bool in_tiles(const Task<bf16>& t, const bf16* q, const bf16* keys, const bf16* values, bf16* out,
              std::vector<float>& memory) {
    if (t.s.width % CHUNK || t.s.value_width % CHUNK || !tiles_granted()) return false;
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
