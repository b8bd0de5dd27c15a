// The best of a row, where it is, and the next best; see top_two.py.

#include "numbers.h"

namespace {

// The best two of every LANES-th value.
template <class W>
struct Lanes {
    static constexpr int64_t LANES = 64 / sizeof(W);
    W high[LANES], second[LANES];
    int32_t at[LANES], strange[LANES];  // strange: a value that is no number

    Lanes() {
        for (int64_t l = 0; l < LANES; l++) {
            high[l] = second[l] = -INFINITY;
            at[l] = int32_t(l);
            strange[l] = 0;
        }
    }

    template <class T>
    void take(const T* in, int64_t first, int64_t count) {
#pragma omp simd
        for (int64_t l = 0; l < count; l++) {
            const W value = widen(in[first + l]);
            const bool up = value > high[l];
            const W lower = up ? high[l] : value;
            second[l] = lower > second[l] ? lower : second[l];
            at[l] = up ? int32_t(first + l) : at[l];
            high[l] = up ? value : high[l];
            strange[l] |= value != value;
        }
    }

    void finish(W& best, int64_t& place, W& next) const {
        int64_t top = 0;
        bool any = strange[0];
        for (int64_t l = 1; l < LANES; l++) {
            any |= strange[l];
            if (high[l] > high[top] || (high[l] == high[top] && at[l] < at[top])) top = l;
        }
        next = second[top];
        for (int64_t l = 0; l < LANES; l++)
            if (l != top && high[l] > next) next = high[l];
        best = any ? W(NAN) : high[top];
        place = at[top];
    }
};

}  // namespace

template <class T>
static void run(const T* x, int64_t stride, T* best, int64_t* place, T* next, int64_t n,
                int64_t size) {
    using W = wide<T>;
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t row = 0; row < n; row++) {
        const int64_t whole = size / Lanes<W>::LANES * Lanes<W>::LANES;
        Lanes<W> lanes;
        for (int64_t i = 0; i < whole; i += Lanes<W>::LANES)
            lanes.take(x + row * stride, i, Lanes<W>::LANES);
        lanes.take(x + row * stride, whole, size - whole);
        W high, second;
        lanes.finish(high, place[row], second);
        narrow(high, best[row]);
        narrow(second, next[row]);
    }
}

extern "C" void top_two(int type, const void* x, int64_t stride, void* best, int64_t* place,
                        void* next, int64_t n, int64_t size) {
#define CALL(T) run((const T*)x, stride, (T*)best, place, (T*)next, n, size)
    BY_TYPE(type, CALL)
}
