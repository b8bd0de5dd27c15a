// Attention of a few rows a sequence over the pages; see few_rows.py. The query heads that
// share a key head, times the rows of the sequence, are lines that read each key once together.
// A line's sums run over its keys in order, whatever runs beside it.

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace {

struct Shape {
    const int64_t *starts, *lengths;
    const int32_t* pages;
    int64_t batch, table, page_size;  // table: page ids a sequence
    int64_t heads, key_heads, width, value_width;
    int64_t q_head, q_row, keys_head, keys_slot, values_head, values_slot;
    double scaling, softcap;  // softcap 0: none
    int64_t window, most;     // window 0: none; sequences of more rows are left out

    int64_t slot(int64_t sequence, int64_t position) const {
        return int64_t(pages[sequence * table + position / page_size]) * page_size +
               position % page_size;
    }
};

// D: the width where it is known when this is compiled, else 0.
template <class T, int D>
void one(const Shape& s, const T* q, const T* keys, const T* values, T* out, int64_t sequence,
         int64_t head, std::vector<wide<T>>& memory) {
    using W = wide<T>;
    const int64_t first = s.starts[sequence], rows = s.starts[sequence + 1] - first;
    const int64_t length = s.lengths[sequence], group = s.heads / s.key_heads;
    const int64_t lines = rows * group, width = D ? D : s.width, out_width = D ? D : s.value_width;
    const int64_t low = s.window ? std::max<int64_t>(0, length - rows + 1 - s.window) : 0;
    const int64_t span = length - low;
    memory.resize(lines * (width + span + out_width) + std::max(width, out_width));
    W *query = memory.data(), *scores = query + lines * width, *sums = scores + lines * span;
    W* row = sums + lines * out_width;
    for (int64_t line = 0; line < lines; line++) {
        const T* from = q + (head * group + line % group) * s.q_head +
                        (first + line / group) * s.q_row;
        for (int64_t i = 0; i < width; i++) query[line * width + i] = widen(from[i]) * W(s.scaling);
    }
    const T* base = keys + head * s.keys_head;
    for (int64_t j = 0; j < span; j++) {
        const T* key = base + s.slot(sequence, low + j) * s.keys_slot;
        for (int64_t i = 0; i < width; i++) row[i] = widen(key[i]);
        for (int64_t line = 0; line < lines; line++) {
            W dot = 0;
            for (int64_t i = 0; i < width; i++) dot += query[line * width + i] * row[i];
            scores[line * span + j] = dot;
        }
    }
    for (int64_t line = 0; line < lines; line++) {
        W* mine = scores + line * span;
        const int64_t end = span - rows + line / group + 1;  // keys behind it are the next rows'
        const int64_t begin = s.window ? std::max<int64_t>(0, end - s.window) : 0;
        if (s.softcap != 0)
            for (int64_t j = begin; j < end; j++)
                mine[j] = W(s.softcap) * std::tanh(mine[j] / W(s.softcap));
        W top = mine[begin], mass = 0;
        for (int64_t j = begin; j < end; j++) top = mine[j] > top ? mine[j] : top;
        for (int64_t j = begin; j < end; j++) {
            mine[j] = exponential(mine[j] - top);
            mass += mine[j];
        }
        for (int64_t j = begin; j < end; j++) mine[j] /= mass;
        std::fill(mine, mine + begin, W(0));
        std::fill(mine + end, mine + span, W(0));
    }
    std::fill(sums, sums + lines * out_width, W(0));
    const T* value_base = values + head * s.values_head;
    for (int64_t j = 0; j < span; j++) {
        const T* value = value_base + s.slot(sequence, low + j) * s.values_slot;
        for (int64_t i = 0; i < out_width; i++) row[i] = widen(value[i]);
        for (int64_t line = 0; line < lines; line++) {
            const W weight = scores[line * span + j];
            for (int64_t i = 0; i < out_width; i++) sums[line * out_width + i] += weight * row[i];
        }
    }
    for (int64_t line = 0; line < lines; line++) {
        T* to = out + ((first + line / group) * s.heads + head * group + line % group) * out_width;
        for (int64_t i = 0; i < out_width; i++) narrow(sums[line * out_width + i], to[i]);
    }
}

template <class T>
void run(const Shape& s, const T* q, const T* keys, const T* values, T* out) {
#pragma omp parallel if (s.batch * s.key_heads > 1)
    {
        std::vector<wide<T>> memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t sequence = 0; sequence < s.batch; sequence++)
            for (int64_t head = 0; head < s.key_heads; head++) {
                const int64_t rows = s.starts[sequence + 1] - s.starts[sequence];
                if (rows == 0 || rows > s.most) continue;
                if (s.width == 64 && s.value_width == 64)
                    one<T, 64>(s, q, keys, values, out, sequence, head, memory);
                else if (s.width == 128 && s.value_width == 128)
                    one<T, 128>(s, q, keys, values, out, sequence, head, memory);
                else
                    one<T, 0>(s, q, keys, values, out, sequence, head, memory);
            }
    }
}

}  // namespace

extern "C" void attend(int type, const void* q, const void* keys, const void* values,
                                void* out, const Shape* shape) {
#define CALL(T) run(*shape, (const T*)q, (const T*)keys, (const T*)values, (T*)out)
    BY_TYPE(type, CALL)
}
