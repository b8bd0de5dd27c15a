// A softmax pair per row of a chunk of logits; see distill_chunk.py. A row stays in the processor's
// cache while it is read for its maximum, its sum, and figures and gradient.

#include <algorithm>

#include "numbers.h"

const int LANES = 64;

template <bool CAPPED, class W> static inline W capped(W z, W cap) {
    if (!CAPPED) return z;
    const W x = z / cap, t = exponential(-2 * (x < 0 ? -x : x)), y = (1 - t) / (1 + t);
    return cap * (x < 0 ? -y : y);
}

// The largest of sign * x, in lanes: a maximum is not reordered into vectors by itself.
template <int SIGN, class T> static wide<T> largest(const T* row, int64_t size) {
    using W = wide<T>;
    W lane[LANES], best = -INFINITY;
    std::fill(lane, lane + LANES, best);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const W z = SIGN * widen(row[i + j]);
            lane[j] = z > lane[j] ? z : lane[j];
        }
    for (; i < size; i++) best = SIGN * widen(row[i]) > best ? SIGN * widen(row[i]) : best;
    for (int j = 0; j < LANES; j++) best = lane[j] > best ? lane[j] : best;
    return best;
}

// logsumexp and the first column of the maximum.
template <bool CAPPED, class T>
static void sums(const T* row, int64_t size, wide<T> scale, wide<T> cap, wide<T>& log_sum,
                 int64_t& top) {
    using W = wide<T>;
    const W best = scale < 0 ? -largest<-1>(row, size) : largest<1>(row, size);
    const W highest = capped<CAPPED>(best * scale, cap);
    W sum = 0;
    int32_t first = int32_t(size);
    for (int64_t i = 0; i < size; i++) {
        const W z = widen(row[i]);
        sum += exponential(capped<CAPPED>(z * scale, cap) - highest);
        const int32_t at = z == best ? int32_t(i) : int32_t(size);
        first = at < first ? at : first;
    }
    log_sum = highest + std::log(sum);
    top = first < size ? first : 0;
}

template <bool CAPPED, class T>
static void run(T* students, const T* teachers, const int64_t* rows, int64_t num_students,
                int64_t num_teachers, int64_t size, wide<T> scale, wide<T> cap, int gradient,
                wide<T>* log_t, int64_t* top_t, wide<T>* cross, wide<T>* kl, wide<T>* acceptance,
                int64_t* top) {
    using W = wide<T>;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < num_teachers; t++)
        sums<CAPPED>(teachers + t * size, size, scale, cap, log_t[t], top_t[t]);
#pragma omp parallel for schedule(static)
    for (int64_t s = 0; s < num_students; s++) {
        T* __restrict student = students + s * size;
        const T* __restrict teacher = teachers + rows[s] * size;
        W log_z;
        sums<CAPPED>(student, size, scale, cap, log_z, top[s]);
        const W log_p_sum = log_t[rows[s]], inverse = cap == 0 ? W(0) : 1 / cap;
        W of_cross = 0, of_kl = 0, of_both = 0;
        for (int64_t i = 0; i < size; i++) {
            const W z = capped<CAPPED>(widen(student[i]) * scale, cap);
            const W log_q = z - log_z;
            const W log_p = capped<CAPPED>(widen(teacher[i]) * scale, cap) - log_p_sum;
            const W q = exponential(log_q), p = exponential(log_p);
            of_cross -= p * log_q;
            of_kl += p * (log_p - log_q);
            of_both += p < q ? p : q;
            const W slope = CAPPED ? 1 - z * inverse * (z * inverse) : W(1);
            narrow(gradient ? (q - p) * slope : widen(student[i]), student[i]);
        }
        cross[s] = of_cross;
        kl[s] = of_kl;
        acceptance[s] = of_both;
    }
}

extern "C" void distill_chunk(int type, void* students, const void* teachers, const int64_t* rows,
                              int64_t num_students, int64_t num_teachers, int64_t size,
                              double scale, double cap, int gradient, void* log_t, int64_t* top_t,
                              void* cross, void* kl, void* acceptance, int64_t* top) {
#define CALL(T)                                                                                \
    (cap == 0 ? run<false, T> : run<true, T>)(                                                 \
        (T*)students, (const T*)teachers, rows, num_students, num_teachers, size,              \
        wide<T>(scale), wide<T>(cap), gradient, (wide<T>*)log_t, top_t, (wide<T>*)cross,       \
        (wide<T>*)kl, (wide<T>*)acceptance, top)
    BY_TYPE(type, CALL)
}
