// The processor's matrix tiles (AMX): who may use them, and their shapes.

#pragma once

#ifdef __AMX_BF16__

#include <cstdint>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system grants this process the tiles (XTILEDATA).
inline bool tiles_granted() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// Tiles of up to 16 rows of 64 bytes.
struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

    void load() const {
        // GCC takes the instruction to read 8 of the 64 bytes: all must be written before it.
        __asm__ volatile("" : : "r"(this) : "memory");
        _tile_loadconfig(this);
    }
};

#endif
