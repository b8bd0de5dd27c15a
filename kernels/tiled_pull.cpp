// Backward of causal attention over documents in matrix tiles (AMX, bfloat16); see tiled_pull.py.
//
// Scores are made turned, keys by queries: then the probabilities P^T and their slopes dS^T come out
// in the order in which dV += P^T dO and dK += dS^T Q read them, and only dQ^T += K^T dS^T needs
// them in pairs of keys. A block is KEYS keys by QUERIES queries.

#include "numbers.h"

struct Call {
    const bf16 *q, *k, *v, *grad;
    const float *mass, *drop;  // [Hq, N]: log-sum-exp of all a query sees; sum_d grad_d out_d
    bf16* dq;                  // [Hq, N, D]
    float *dk, *dv;            // [Hq, N, D]: a query head's share
    const int64_t* bounds;
    int64_t documents, heads, groups, tokens, width;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row, g_head, g_row;
    float scaling;
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

constexpr int64_t KEYS = 32, QUERIES = 128, WIDEST = 128;

// C [m, n] (+)= A [m, k] B, m and n multiples of 32, k of 32. A: rows of bf16, `a_row` apart. B: rows
// of pairs, [k / 2][n][2], `b_row` pairs apart. C: float32, `c_row` apart.
template <bool ADD>
inline void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t a_row,
                    const uint32_t* b, int64_t b_row, float* c, int64_t c_row) {
    for (int64_t i = 0; i < m; i += 32)
        for (int64_t j = 0; j < n; j += 32) {
            float* at = c + i * c_row + j;
            float* below = at + 16 * c_row;
            if (ADD) {
                _tile_loadd(0, at, 4 * c_row);
                _tile_loadd(1, at + 16, 4 * c_row);
                _tile_loadd(2, below, 4 * c_row);
                _tile_loadd(3, below + 16, 4 * c_row);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t p = 0; p < k; p += 32) {
                _tile_loadd(4, a + i * a_row + p, 2 * a_row);
                _tile_loadd(5, a + (i + 16) * a_row + p, 2 * a_row);
                _tile_loadd(6, b + p / 2 * b_row + j, 4 * b_row);
                _tile_loadd(7, b + p / 2 * b_row + j + 16, 4 * b_row);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, at, 4 * c_row);
            _tile_stored(1, at + 16, 4 * c_row);
            _tile_stored(2, below, 4 * c_row);
            _tile_stored(3, below + 16, 4 * c_row);
        }
}

// 32 float32 to bfloat16.
inline void round32(const float* x, bf16* to) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
    _mm512_storeu_si512(to, (__m512i)both);
}

inline uint32_t pair(bf16 low, bf16 high) { return low.bits | uint32_t(high.bits) << 16; }

// Rows x [n, width] of a document, zero behind its end, in the two orders of a B.
struct Packed {
    std::vector<bf16> rows;
    std::vector<uint32_t> by_width;  // [width / 2][QUERIES]: pairs of columns
    std::vector<uint32_t> by_row;    // [QUERIES / 2][width]: pairs of rows

    void fill(const bf16* x, int64_t stride, int64_t n, int64_t width) {
        rows.assign(QUERIES * width, bf16{0});
        by_width.resize(width / 2 * QUERIES);
        by_row.resize(QUERIES / 2 * width);
        for (int64_t i = 0; i < n; i++)
            std::memcpy(&rows[i * width], x + i * stride, 2 * width);
        for (int64_t i = 0; i < QUERIES; i++)
            for (int64_t d = 0; d < width; d += 2)
                by_width[d / 2 * QUERIES + i] = pair(rows[i * width + d], rows[i * width + d + 1]);
        for (int64_t i = 0; i < QUERIES; i += 2)
            for (int64_t d = 0; d < width; d++)
                by_row[i / 2 * width + d] = pair(rows[i * width + d], rows[(i + 1) * width + d]);
    }
};

struct Memory {
    std::vector<bf16> k, v, turned;  // [n, D], [n, D], K^T [D, n]
    std::vector<float> dk, dv;
    Packed q, grad;
};

void document(const Call& c, int64_t head, int64_t begin, int64_t end, Memory& m) {
    const int64_t n = end - begin, width = c.width, own = head / c.groups;
    const int64_t padded = (n + KEYS - 1) / KEYS * KEYS;
    m.k.assign(padded * width, bf16{0});
    m.v.assign(padded * width, bf16{0});
    m.turned.assign(width * padded, bf16{0});
    m.dk.assign(padded * width, 0);
    m.dv.assign(padded * width, 0);
    for (int64_t j = 0; j < n; j++) {
        std::memcpy(&m.k[j * width], c.k + own * c.k_head + (begin + j) * c.k_row, 2 * width);
        std::memcpy(&m.v[j * width], c.v + own * c.v_head + (begin + j) * c.v_row, 2 * width);
        for (int64_t d = 0; d < width; d++) m.turned[d * padded + j] = m.k[j * width + d];
    }
    alignas(64) static thread_local float scores[KEYS][QUERIES], slopes[KEYS][QUERIES];
    alignas(64) static thread_local bf16 p[KEYS][QUERIES], ds[KEYS][QUERIES];
    alignas(64) static thread_local uint32_t pairs[KEYS / 2][QUERIES];
    alignas(64) static thread_local float dq[WIDEST][QUERIES];
    alignas(64) float mass[QUERIES], drop[QUERIES];
    Tiles().load();
    for (int64_t top = 0; top < n; top += QUERIES) {
        const int64_t lines = std::min(QUERIES, n - top), first = begin + top;
        m.q.fill(c.q + head * c.q_head + first * c.q_row, c.q_row, lines, width);
        m.grad.fill(c.grad + head * c.g_head + first * c.g_row, c.g_row, lines, width);
        for (int64_t i = 0; i < QUERIES; i++) {  // a line that is not there has no probability
            mass[i] = i < lines ? c.mass[head * c.tokens + first + i] : 1e30f;
            drop[i] = i < lines ? c.drop[head * c.tokens + first + i] : 0;
        }
        std::fill(&dq[0][0], &dq[0][0] + width * QUERIES, 0.0f);
        for (int64_t j = 0; j < std::min(top + QUERIES, padded); j += KEYS) {
            product<false>(KEYS, QUERIES, width, &m.k[j * width], width, m.q.by_width.data(),
                           QUERIES, &scores[0][0], QUERIES);
            product<false>(KEYS, QUERIES, width, &m.v[j * width], width, m.grad.by_width.data(),
                           QUERIES, &slopes[0][0], QUERIES);
            const bool crosses = j + KEYS - 1 > top;
            for (int64_t r = 0; r < KEYS; r++) {
                const int32_t hidden = crosses ? int32_t(std::max<int64_t>(0, j + r - top)) : 0;
                float* __restrict s = scores[r];
                float* __restrict g = slopes[r];
                for (int32_t i = 0; i < QUERIES; i++) {
                    const float weight = exponential(s[i] * c.scaling - mass[i]);
                    s[i] = i < hidden ? 0.0f : weight;
                    g[i] = s[i] * (g[i] - drop[i]) * c.scaling;
                }
                bf16* __restrict to_p = p[r];
                bf16* __restrict to_ds = ds[r];
                for (int32_t i = 0; i < QUERIES; i += 32) {
                    round32(s + i, to_p + i);
                    round32(g + i, to_ds + i);
                }
            }
            for (int64_t r = 0; r < KEYS; r += 2)
                for (int64_t i = 0; i < QUERIES; i++)
                    pairs[r / 2][i] = pair(ds[r][i], ds[r + 1][i]);
            product<true>(KEYS, width, QUERIES, p[0], QUERIES, m.grad.by_row.data(), width,
                          &m.dv[j * width], width);
            product<true>(KEYS, width, QUERIES, ds[0], QUERIES, m.q.by_row.data(), width,
                          &m.dk[j * width], width);
            product<true>(width, QUERIES, KEYS, &m.turned[j], padded, pairs[0], QUERIES, dq[0],
                          QUERIES);
        }
        for (int64_t i = 0; i < lines; i++) {
            bf16* to = c.dq + (head * c.tokens + first + i) * width;
            for (int64_t d = 0; d < width; d++) narrow(dq[d][i], to[d]);
        }
    }
    _tile_release();
    std::copy_n(m.dk.data(), n * width, c.dk + (head * c.tokens + begin) * width);
    std::copy_n(m.dv.data(), n * width, c.dv + (head * c.tokens + begin) * width);
}

}  // namespace

extern "C" int tiled() {
    return tiles_granted();
}

extern "C" void pull(const Call* call) {
#pragma omp parallel
    {
        Memory memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t head = 0; head < call->heads; head++)
            for (int64_t one = 0; one < call->documents; one++)
                document(*call, head, call->bounds[one], call->bounds[one + 1], memory);
    }
}

#else

extern "C" int tiled() { return 0; }
extern "C" void pull(const Call*) {}

#endif
