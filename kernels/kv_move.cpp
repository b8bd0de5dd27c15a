// The kept rows of drafted trees to their places, in all layers at once; see kv_move.py.

#include <cstdint>
#include <cstring>

struct Pool {
    char* rows;
    int64_t heads, head_stride, slot_stride, bytes;  // strides in bytes; bytes of a row
};

extern "C" void compact_paths(const Pool* pools, int64_t count, const int32_t* pages, int64_t table,
                              int64_t page_size, const int64_t* first, const int64_t* path,
                              int64_t batch, int64_t steps) {
    const auto slot = [&](int64_t sequence, int64_t position) {
        return pages[sequence * table + position / page_size] * page_size + position % page_size;
    };
    for (int64_t sequence = 0; sequence < batch; sequence++)
        for (int64_t step = 0; step < steps; step++) {
            const int64_t offset = path[sequence * steps + step];
            if (offset <= step) continue;  // behind the path's end, or in its place already
            const int64_t from = slot(sequence, first[sequence] + offset);
            const int64_t to = slot(sequence, first[sequence] + step);
            for (int64_t i = 0; i < count; i++)
                for (int64_t head = 0; head < pools[i].heads; head++) {
                    char* rows = pools[i].rows + head * pools[i].head_stride;
                    std::memcpy(rows + to * pools[i].slot_stride, rows + from * pools[i].slot_stride,
                                pools[i].bytes);
                }
        }
}
