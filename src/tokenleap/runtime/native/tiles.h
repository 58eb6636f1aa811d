// Products of bfloat16 on processors with tiles (Intel's AMX), for linear layers and for attention.
//
// Tiles add products up in an order of their own. So where there are tiles, they multiply all rows, even a single one,
// and the bits of a row do not depend on the others (invariant 7). A single row takes as long as without tiles, since
// its weights come from memory; sixteen take hardly longer, and 512 take a ninth of the time.
//
// Bytes are left to linear.h: tiles multiply them no faster, because most of the time goes into their scales.

#pragma once

#include "formats.h"

#if defined(TOKENLEAP_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define TOKENLEAP_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tokenleap {

#ifdef TOKENLEAP_TILES

constexpr bool HAVE_TILES = true;

// Have everything written that tiles will read: GCC does not know that their instructions read memory.
inline void barrier(const void* read = nullptr) { asm volatile("" ::"r"(read) : "memory"); }

// This thread's tiles, as long as the object lives: 0 to 3 are sums, 4 and 5 left factors, 6 and 7 right ones.
class TileShapes {
public:
    static constexpr int HEIGHT = 16;  // most rows of a tile, each of 64 bytes

    // Linux gives a process the registers of tiles if it asks for them.
    static bool granted() {
        constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool is = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
        return is;
    }

    // `rows` of left factors; 0 leaves the tiles as they are.
    explicit TileShapes(int rows) : rows_(rows) {
        if (!rows) return;
        alignas(64) Shapes shapes{};
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            shapes.rows[tile] = tile < 6 ? rows : HEIGHT;
            shapes.bytes[tile] = 64;
        }
        barrier(&shapes);
        _tile_loadconfig(&shapes);
    }

    ~TileShapes() {
        if (rows_) _tile_release();
    }

    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;

private:
    struct Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };

    int rows_;
};

// The tiles for a product of a linear layer and so many rows, if tiles take it.
class Tiles {
public:
    static constexpr int MOST = 2 * TileShapes::HEIGHT;  // rows of a kernel

    Tiles(const Linear& layer, int rows) : rows_(rows_of(layer, rows)), shapes_(rows_ < HEIGHT ? rows_ : HEIGHT) {}

    // The rows of a kernel; 0 if tiles do not take this product.
    int rows() const { return rows_; }

    static Kernel kernel(int rows) { return rows > HEIGHT ? run<true> : run<false>; }

private:
    static constexpr int HEIGHT = TileShapes::HEIGHT;

    static int rows_of(const Linear& layer, int rows) {
        if (layer.format != Format::BF16 || layer.inputs % 32 != 0 || !TileShapes::granted()) return 0;
        return rows < HEIGHT ? rows : rows < MOST ? HEIGHT : MOST;
    }

    template <bool TWICE>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch ahead, float* out) {
        constexpr size_t WIDTH = 4 * PANEL;  // bytes of a row of weights, and of a row of sums
        int steps = inputs / 32;
        ahead.split_into(steps);
        barrier();
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TWICE) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < steps; k++) {
            ahead.some();
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

    int rows_;
    TileShapes shapes_;
};

// Attention of up to sixteen queries in width D, within `TileShapes(HEIGHT)`.
template <int D>
struct TileProducts {
    // Of queries [16][D] and as many keys as lanes of VECTORS: [VECTORS][D/2] words -> [16][VECTORS][LANES].
    template <int VECTORS>
    static void scores(const bf16* queries, const u32x16 (*keys)[D / 2], float* to) {
        barrier();
        _tile_zero(0);
        if constexpr (VECTORS > 1) _tile_zero(1);
        for (int d = 0; d < D; d += 32) {
            _tile_loadd(4, queries + d, sizeof(bf16) * D);
            _tile_loadd(6, keys[0] + d / 2, 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (VECTORS > 1) {
                _tile_loadd(7, keys[1] + d / 2, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        _tile_stored(0, to, 64 * VECTORS);
        if constexpr (VECTORS > 1) _tile_stored(1, to + LANES, 64 * VECTORS);
    }

    // Add to sums [16][D] weights [16][32 * chunks] times values: words of two ranks, [16 * chunks][D]. The strides are
    // in bytes; with strides of 0, all sixteen are the same query.
    static void add_values(const bf16* weights, size_t stride, const uint32_t (*words)[D], int chunks, float* sums,
                           size_t sums_stride) {
        constexpr int PARTS = D / LANES;
        barrier();
        for (int part = 0; part < PARTS; part += 2) {
            float* at = sums + part * LANES;
            _tile_loadd(0, at, sums_stride);
            _tile_loadd(1, at + LANES, sums_stride);
            for (int chunk = 0; chunk < chunks; chunk++) {
                _tile_loadd(4, weights + chunk * 32, stride);
                _tile_loadd(6, words[chunk * 16] + part * LANES, sizeof(uint32_t) * D);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, words[chunk * 16] + (part + 1) * LANES, sizeof(uint32_t) * D);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, at, sums_stride);
            _tile_stored(1, at + LANES, sums_stride);
        }
    }
};

#else

constexpr bool HAVE_TILES = false;

struct TileShapes {
    static constexpr int HEIGHT = 16;

    static bool granted() { return false; }
    explicit TileShapes(int) {}
};

template <int D>
struct TileProducts;

class Tiles {
public:
    static constexpr int MOST = 1;

    Tiles(const Linear&, int) {}
    int rows() const { return 0; }
    static Kernel kernel(int) { return nullptr; }
};

#endif

}  // namespace tokenleap
