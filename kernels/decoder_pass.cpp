// All layers of a pass of few rows a sequence in one call, and what lies between the attentions of
// many; see decoder_pass.py. Of few rows, one team of threads goes through all and meets between the
// steps of a layer; many are cut into blocks that a thread takes through all steps by itself. Each
// step is the function that the op beside it runs.

#include "few_rows.h"
#include "packed_linear.h"
#include "rows.h"

#ifndef PRODUCTS

extern "C" {
int usable() { return 0; }
void decoder_pass(const void*, const void*, const void*, int64_t) {}
void between(const void*, const void*, const void*, const void*, void*, void*) {}
}

#else

#include <memory>

namespace {

struct Norm {
    const bf16* weight;  // null: none
    double eps;
};

struct Layer {
    Norm input, mlp, q, k;
    const bf16 *qkv, *bias, *o, *gated, *down;  // bias null: none
    int64_t window;                             // 0: none
};

// Where a layer's keys and values lie, and where its result goes.
struct Place {
    bf16 *keys, *values, *out;
};

struct Pass {
    attention::Shape shape;  // of a layer without a window
    const int64_t* slots;
    const bf16 *x, *read, *cos, *sin;  // read null: the first layer reads its input norm of x
    int64_t rows, size, inner, read_size, cos_stride, sin_stride;
};

// The rows of a sequence that belong to a key head: turned in place, keys and values stored.
struct Heads {
    const Pass& p;
    const Layer& layer;
    Place place;
    bf16* qkv;

    void prepare(int64_t first, int64_t rows, int64_t head, float* memory) const {
        const attention::Shape& s = p.shape;
        const int64_t key = s.heads + head, value = key + s.key_heads;
        for (int64_t row = first; row < first + rows; row++) {
            turn_row(row, head, memory);
            const int64_t slot = p.slots[row];
            if (slot < 0) continue;
            std::memcpy(place.keys + head * s.keys_head + slot * s.keys_slot, at(row, key),
                        2 * s.width);
            std::memcpy(place.values + head * s.values_head + slot * s.values_slot, at(row, value),
                        2 * s.width);
        }
    }

    void turn_row(int64_t row, int64_t head, float* memory) const {
        const attention::Shape& s = p.shape;
        const int64_t group = s.heads / s.key_heads, width = s.width, key = s.heads + head;
        float *cos = memory, *sin = cos + width, *rest = sin + width;
        for (int64_t i = 0; i < width; i++) cos[i] = widen(p.cos[row * p.cos_stride + i]);
        for (int64_t i = 0; i < width; i++) sin[i] = widen(p.sin[row * p.sin_stride + i]);
        for (int64_t i = head * group; i < (head + 1) * group; i++)
            turn(row, i, layer.q, cos, sin, rest);
        turn(row, key, layer.k, cos, sin, rest);
        add_bias(row, key + s.key_heads);
    }

    bf16* at(int64_t row, int64_t head) const {
        return qkv + row * p.shape.q_row + head * p.shape.width;
    }

    void add_bias(int64_t row, int64_t head) const {
        if (!layer.bias) return;
        const int64_t width = p.shape.width;
        bf16* own = at(row, head);
        for (int64_t i = 0; i < width; i++)
            narrow(widen(own[i]) + widen(layer.bias[head * width + i]), own[i]);
    }

    void turn(int64_t row, int64_t head, const Norm& norm, const float* cos, const float* sin,
              float* rest) const {
        const int64_t width = p.shape.width;
        bf16* own = at(row, head);
        add_bias(row, head);
        if (norm.weight) {
            bf16* normed = (bf16*)rest;
            norm_row(own, norm.weight, normed, width, norm.eps);
            std::memcpy(own, normed, 2 * width);
        }
        rotate_head(own, cos, sin, width / 2, rest);
    }
};

void norm_rows(const bf16* x, const Norm& norm, bf16* y, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * size, norm.weight, y + row * size, size, norm.eps);
}

void norm_block(const bf16* x, const Norm& norm, bf16* y, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * size, norm.weight, y + row * size, size, norm.eps);
}

constexpr int64_t BLOCK = 256;  // rows that a thread takes along

struct alignas(64) Line {  // tiles read whole lines of the cache
    bf16 at[32];
};

}  // namespace

extern "C" {

int usable() { return product::granted(); }

void decoder_pass(const Pass* pass, const Layer* layers, const Place* places, int64_t count) {
    using product::Call, product::run;
    const Pass& p = *pass;
    const attention::Shape& s = p.shape;
    const int64_t mixed_size = s.heads * s.width, qkv_size = s.q_row;
    const int64_t wide = p.size + qkv_size + mixed_size + p.size + p.inner;
    const std::unique_ptr<Line[]> memory(new Line[p.rows * wide / 32 + 1]);
    bf16 *normed = memory[0].at, *qkv = normed + p.rows * p.size, *mixed = qkv + p.rows * qkv_size;
    bf16 *middle = mixed + p.rows * mixed_size, *inner = middle + p.rows * p.size;
#pragma omp parallel
    {
        std::vector<float> scratch, turning(4 * s.width);
        const bf16* x = p.x;
        for (int64_t i = 0; i < count; i++) {
            const Layer& layer = layers[i];
            const Place& place = places[i];
            const bf16* read = x;
            int64_t read_size = p.size;
            if (i == 0 && p.read) {
                read = p.read;
                read_size = p.read_size;
            } else if (layer.input.weight) {
                norm_rows(x, layer.input, normed, p.rows, p.size);
                read = normed;
            }
            run({read, layer.qkv, nullptr, qkv, read_size, 0, qkv_size, read_size, product::NONE},
                p.rows);
            attention::Shape own = s;
            own.window = layer.window;
            const Heads heads{p, layer, place, qkv};
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t sequence = 0; sequence < s.batch; sequence++)
                for (int64_t head = 0; head < s.key_heads; head++) {
                    const attention::Task<bf16> task(own, sequence, head);
                    if (!task.rows) continue;
                    heads.prepare(task.first, task.rows, head, turning.data());
                    attention::attend(task, qkv, place.keys, place.values, mixed, scratch);
                }
            run({mixed, layer.o, x, middle, mixed_size, p.size, p.size, mixed_size, product::ADD},
                p.rows);
            norm_rows(middle, layer.mlp, normed, p.rows, p.size);
            run({normed, layer.gated, nullptr, inner, p.size, 0, p.inner, p.size, product::GATE},
                p.rows);
            run({inner, layer.down, middle, place.out, p.inner, p.size, p.size, p.inner,
                 product::ADD},
                p.rows);
            x = place.out;
        }
    }
}

// From the attention of layer `done` to that of layer `next`, either null at an end of the stack:
// mixed [rows, Hq D] and x -> out [rows, size], which may be x, and qkv [rows, (Hq + 2 Hk) D].
void between(const Pass* pass, const Layer* done, const Layer* next, const bf16* mixed, bf16* out,
             bf16* qkv) {
    using product::Call, product::run_alone;
    const Pass& p = *pass;
    const attention::Shape& s = p.shape;
    const int64_t mixed_size = s.heads * s.width, qkv_size = s.q_row;
    const int64_t share = (p.rows + omp_get_max_threads() - 1) / omp_get_max_threads();
    const int64_t block = std::min(BLOCK, (share + product::ROWS - 1) / product::ROWS * product::ROWS);
#pragma omp parallel
    {
        const std::unique_ptr<Line[]> memory(new Line[block * (2 * p.size + p.inner) / 32 + 1]);
        bf16 *normed = memory[0].at, *middle = normed + block * p.size;
        bf16* inner = middle + block * p.size;
        std::vector<float> turning(4 * s.width);
#pragma omp for schedule(dynamic)
        for (int64_t top = 0; top < p.rows; top += block) {
            const int64_t rows = std::min(block, p.rows - top);
            const bf16* x = p.x + top * p.size;
            if (done) {
                const bf16* read = mixed + top * mixed_size;
                bf16* to = out + top * p.size;
                run_alone({read, done->o, x, middle, mixed_size, p.size, p.size, mixed_size,
                           product::ADD}, rows);
                norm_block(middle, done->mlp, normed, rows, p.size);
                run_alone({normed, done->gated, nullptr, inner, p.size, 0, p.inner, p.size,
                           product::GATE}, rows);
                run_alone({inner, done->down, middle, to, p.inner, p.size, p.size, p.inner,
                           product::ADD}, rows);
                x = to;
            }
            if (!next) continue;
            if (next->input.weight) {
                norm_block(x, next->input, normed, rows, p.size);
                x = normed;
            }
            run_alone({x, next->qkv, nullptr, qkv + top * qkv_size, p.size, 0, qkv_size, p.size,
                       product::NONE}, rows);
            const Heads heads{p, *next, Place{}, qkv};
            for (int64_t row = top; row < top + rows; row++)
                for (int64_t head = 0; head < s.key_heads; head++)
                    heads.turn_row(row, head, turning.data());
        }
    }
}
}

#endif
