// The best of a row and their log-probabilities; see top_ranked.py.

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;

// A block is looked into only where its best passes the last of the ranked, which few do.
template <class T>
void rank(const T* in, int64_t size, int64_t count, wide<T>* values, int64_t* places) {
    using W = wide<T>;
    for (int64_t i = 0; i < count; i++) {
        values[i] = -INFINITY;
        places[i] = i;
    }
    int64_t filled = 0;
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t end = first + BLOCK < size ? first + BLOCK : size;
        W top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = first; i < end; i++) {
            const W value = widen(in[i]);
            top = value > top ? value : top;
        }
        if (filled == count && !(top > values[count - 1])) continue;
        for (int64_t i = first; i < end; i++) {
            const W value = widen(in[i]);
            if (filled == count && !(value > values[count - 1])) continue;
            int64_t at = filled < count ? filled++ : count - 1;
            for (; at > 0 && value > values[at - 1]; at--) {
                values[at] = values[at - 1];
                places[at] = places[at - 1];
            }
            values[at] = value;
            places[at] = i;
        }
    }
}

template <class T>
wide<T> log_sum(const T* in, int64_t size, wide<T> highest) {
    wide<T> sum = 0;
    int32_t strange = 0;  // a value that is no number
#pragma omp simd reduction(+ : sum) reduction(| : strange)
    for (int64_t i = 0; i < size; i++) {
        const wide<T> value = widen(in[i]);
        strange |= value != value;
        sum += exponential(value - highest);
    }
    return strange ? wide<T>(NAN) : highest + std::log(sum);
}

template <class T>
void run(const T* x, int64_t stride, wide<T>* chances, int64_t* places, int64_t n, int64_t size,
         int64_t count) {
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t row = 0; row < n; row++) {
        wide<T>* mine = chances + row * count;
        rank(x + row * stride, size, count, mine, places + row * count);
        const wide<T> total = log_sum(x + row * stride, size, mine[0]);
        // Rounding must not lift a share above the whole.
        for (int64_t i = 0; i < count; i++) mine[i] = mine[i] > total ? 0 : mine[i] - total;
    }
}

}  // namespace

extern "C" void top_ranked(int type, const void* x, int64_t stride, void* chances, int64_t* places,
                           int64_t n, int64_t size, int64_t count) {
#define CALL(T) run((const T*)x, stride, (wide<T>*)chances, places, n, size, count)
    BY_TYPE(type, CALL)
}
