// The best of a row, where it is, and the next best; see top_two.py.

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;

// The best two of the values so far.
template <class W>
struct Two {
    W high = -INFINITY, second = -INFINITY;
    int64_t at = 0;

    void take(W value, int64_t place) {
        if (value > high) {
            second = high;
            high = value;
            at = place;
        } else if (value > second) {
            second = value;
        }
    }
};

// A block is looked into only where its best passes the second so far, which few do.
template <class T>
Two<wide<T>> two_of(const T* in, int64_t size) {
    using W = wide<T>;
    Two<W> two;
    int32_t strange = 0;  // a value that is no number
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t end = first + BLOCK < size ? first + BLOCK : size;
        W top = -INFINITY;
#pragma omp simd reduction(max : top) reduction(| : strange)
        for (int64_t i = first; i < end; i++) {
            const W value = widen(in[i]);
            top = value > top ? value : top;
            strange |= value != value;
        }
        if (top > two.second)
            for (int64_t i = first; i < end; i++) two.take(widen(in[i]), i);
    }
    if (strange) two.high = W(NAN);
    return two;
}

}  // namespace

template <class T>
static void run(const T* x, int64_t stride, T* best, int64_t* place, T* next, int64_t n,
                int64_t size) {
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t row = 0; row < n; row++) {
        const auto two = two_of(x + row * stride, size);
        narrow(two.high, best[row]);
        place[row] = two.at;
        narrow(two.second, next[row]);
    }
}

extern "C" void top_two(int type, const void* x, int64_t stride, void* best, int64_t* place,
                        void* next, int64_t n, int64_t size) {
#define CALL(T) run((const T*)x, stride, (T*)best, place, (T*)next, n, size)
    BY_TYPE(type, CALL)
}
