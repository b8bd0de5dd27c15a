// The chain's part of attention, one query against one key a step; see ttt_attention_flash.py.
// Queries [Hq, N, D] and keys [Hkv, N, D] have strides of their own for heads and rows.

#include "numbers.h"

struct Rows {
    int64_t heads, groups, n, width;
};

// scores[h, p] = scale * q[h, p] . key[h / groups, p]
template <class T>
static void run(Rows r, const T* q, int64_t q_head, int64_t q_row, const T* key, int64_t k_head,
                int64_t k_row, wide<T>* scores, double scale) {
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < r.heads * r.groups; head++)
        for (int64_t p = 0; p < r.n; p++) {
            const T* __restrict a = q + head * q_head + p * q_row;
            const T* __restrict b = key + head / r.groups * k_head + p * k_row;
            wide<T> sum = 0;
            for (int64_t i = 0; i < r.width; i++) sum += widen(a[i]) * widen(b[i]);
            scores[head * r.n + p] = sum * wide<T>(scale);
        }
}

// slope = share * (grad . value - drop) * scale; added += slope * key; and over a group's heads
// of_key = sum slope * q, of_value = sum share * grad.
template <class T>
static void pull(Rows r, const T* q, int64_t q_head, int64_t q_row, const T* grad, int64_t g_head,
                 int64_t g_row, const T* key, int64_t k_head, int64_t k_row, const T* value,
                 int64_t v_head, int64_t v_row, const wide<T>* share, const wide<T>* drop,
                 wide<T>* added, T* of_key, T* of_value, double scale) {
    using W = wide<T>;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t own = 0; own < r.heads; own++)
        for (int64_t p = 0; p < r.n; p++) {
            const T* __restrict k = key + own * k_head + p * k_row;
            const T* __restrict v = value + own * v_head + p * v_row;
            W dk[512], dv[512];
            for (int64_t i = 0; i < r.width; i++) dk[i] = dv[i] = 0;
            for (int64_t head = own * r.groups; head < (own + 1) * r.groups; head++) {
                const T* __restrict query = q + head * q_head + p * q_row;
                const T* __restrict up = grad + head * g_head + p * g_row;
                W* __restrict sum = added + (head * r.n + p) * r.width;
                W dot = 0;
                for (int64_t i = 0; i < r.width; i++) dot += widen(up[i]) * widen(v[i]);
                const W weight = share[head * r.n + p];
                const W slope = weight * (dot - drop[head * r.n + p]) * W(scale);
                for (int64_t i = 0; i < r.width; i++) {
                    sum[i] += slope * widen(k[i]);
                    dk[i] += slope * widen(query[i]);
                    dv[i] += weight * widen(up[i]);
                }
            }
            for (int64_t i = 0; i < r.width; i++) {
                narrow(dk[i], of_key[(own * r.n + p) * r.width + i]);
                narrow(dv[i], of_value[(own * r.n + p) * r.width + i]);
            }
        }
}

extern "C" void chain_scores(int type, int64_t heads, int64_t groups, int64_t n, int64_t width,
                             const void* q, int64_t q_head, int64_t q_row, const void* key,
                             int64_t k_head, int64_t k_row, void* scores, double scale) {
    const Rows r = {heads, groups, n, width};
#define CALL(T)                                                                             \
    run(r, (const T*)q, q_head, q_row, (const T*)key, k_head, k_row, (wide<T>*)scores, scale)
    BY_TYPE(type, CALL)
}

extern "C" void chain_pull(int type, int64_t heads, int64_t groups, int64_t n, int64_t width,
                           const void* q, int64_t q_head, int64_t q_row, const void* grad,
                           int64_t g_head, int64_t g_row, const void* key, int64_t k_head,
                           int64_t k_row, const void* value, int64_t v_head, int64_t v_row,
                           const void* share, const void* drop, void* added, void* of_key,
                           void* of_value, double scale) {
    const Rows r = {heads, groups, n, width};
#define PULL(T)                                                                             \
    pull(r, (const T*)q, q_head, q_row, (const T*)grad, g_head, g_row, (const T*)key,       \
         k_head, k_row, (const T*)value, v_head, v_row, (const wide<T>*)share,              \
         (const wide<T>*)drop, (wide<T>*)added, (T*)of_key, (T*)of_value, scale)
    BY_TYPE(type, PULL)
}
