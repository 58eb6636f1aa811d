// Products of bfloat16 on processors with tiles (Intel's AMX): a panel times up to 32 rows at once.
//
// Tiles add products up in an order of their own. So where there are tiles, they multiply all rows, even a single one,
// and the bits of a row do not depend on the others (invariant 7). A single row takes as long as without tiles, since
// its weights come from memory; sixteen take hardly longer, and 512 take a ninth of the time.
//
// Bytes are left to linear.h: tiles multiply them no faster, because most of the time goes into their scales.

#pragma once

#include "formats.h"

#if defined(FORETOKEN_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define FORETOKEN_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foretoken {

// This thread's tiles, configured as long as the object lives, if they take the product of a layer and so many rows.
class Tiles {
public:
    static constexpr int HEIGHT = 16;  // most rows of a tile, each of 64 bytes

#ifdef FORETOKEN_TILES

    Tiles(const Linear& layer, int rows) {
        if (layer.format != Format::BF16 || layer.inputs % 32 != 0 || !granted()) return;
        rows_ = rows < HEIGHT ? rows : rows < 2 * HEIGHT ? HEIGHT : 2 * HEIGHT;
        alignas(64) Shapes shapes{};
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++) {  // 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights
            shapes.rows[tile] = tile < 6 && rows < HEIGHT ? rows : HEIGHT;
            shapes.bytes[tile] = 64;
        }
        _tile_loadconfig(&shapes);
    }

    ~Tiles() {
        if (rows_) _tile_release();
    }

    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // The rows of a kernel; 0 if tiles do not take this product.
    int rows() const { return rows_; }

    static Kernel kernel(int rows) { return rows > HEIGHT ? run<true> : run<false>; }

private:
    struct Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };

    // Linux gives a process the registers of tiles if it asks for them.
    static bool granted() {
        constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool is = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
        return is;
    }

    template <bool TWICE>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        constexpr size_t WIDTH = 4 * PANEL;  // bytes of a row of weights, and of a row of sums
        int steps = inputs / 32;
        later.split_into(steps);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TWICE) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < steps; k++) {
            later.some();
            const uint8_t *weights = panel + k * HEIGHT * WIDTH, *x = rows + k * 64;
            _tile_loadd(6, weights, WIDTH);
            _tile_loadd(4, x, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 64, WIDTH);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (TWICE) {
                _tile_loadd(5, x + HEIGHT * stride, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, WIDTH);
        _tile_stored(1, out + LANES, WIDTH);
        if constexpr (TWICE) {
            _tile_stored(2, out + HEIGHT * PANEL, WIDTH);
            _tile_stored(3, out + HEIGHT * PANEL + LANES, WIDTH);
        }
    }

    int rows_ = 0;

#else

    Tiles(const Linear&, int) {}
    int rows() const { return 0; }
    static Kernel kernel(int) { return nullptr; }

#endif
};

}  // namespace foretoken
