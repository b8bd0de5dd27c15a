// Rows into their slots; see kv_append.py. A row is a number of bytes whatever its type.

#include <cstdint>
#include <cstring>

extern "C" void kv_append(char* pool, int64_t pool_head, int64_t pool_slot, const char* rows,
                          int64_t head_stride, int64_t row_stride, const int64_t* slots, int64_t n,
                          int64_t heads, int64_t bytes) {
    for (int64_t row = 0; row < n; row++)
        if (slots[row] >= 0)
            for (int64_t head = 0; head < heads; head++)
                std::memcpy(pool + head * pool_head + slots[row] * pool_slot,
                            rows + head * head_stride + row * row_stride, bytes);
}
