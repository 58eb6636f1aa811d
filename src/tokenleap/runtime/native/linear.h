// Linear layers: packed weights times input rows (formats.h).
//
// A panel is read once for up to ROWS rows. Every output is one sum over k in ascending order; tiles add 32 products at
// a time, in an order of their own. So its bits do not depend on the other rows (invariant 7). This needs no padding,
// not even for a single row.

#pragma once

#include <algorithm>

#include "tiles.h"

namespace tokenleap {

// Kernels of M rows.


// Of the two vectors of a panel, those that are computed together, so that their sums stay in registers.
template <int M>
constexpr int VECTORS = 2 * M <= SUMS ? 2 : 1;

// The numbers in a 32-bit word, and how products of words are added up.
struct FloatWords {
    static constexpr int PER_WORD = 1;

    static f32x16 dot(f32x16 sum, u32x16 words, uint32_t word) {
        float x;
        std::memcpy(&x, &word, sizeof x);
        return fma((f32x16)words, splat(x), sum);
    }
};

struct Bf16Words {
    static constexpr int PER_WORD = 2;

    static f32x16 dot(f32x16 sum, u32x16 words, uint32_t word) { return dot2(sum, words, word); }
};

template <class Words>
struct WordKernel {
    static constexpr int ROWS = std::min(SUMS, 12);

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        constexpr int TOGETHER = VECTORS<M>;
        int words = inputs / Words::PER_WORD;
        later.split_into(words / 8 * (2 / TOGETHER));
        for (int v = 0; v < 2; v += TOGETHER) multiply<M, TOGETHER>(panel + v * 64, rows, stride, words, later, out + v * LANES);
    }

    template <int M, int TOGETHER>
    static inline void multiply(const uint8_t* panel, const uint8_t* rows, size_t stride, int words, Prefetch& later, float* out) {
        f32x16 sums[M][TOGETHER];
        clear(sums);
        for (int k = 0; k < words; k++) {
            if (k % 8 == 0) later.some();
            const uint32_t* w = (const uint32_t*)panel + k * PANEL;
#pragma GCC unroll 2
            for (int v = 0; v < TOGETHER; v++) {
                u32x16 wv = load<u32x16>(w + v * LANES);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    uint32_t x = ((const uint32_t*)(rows + m * stride))[k];
                    sums[m][v] = Words::dot(sums[m][v], wv, x);
                }
            }
        }
        put(sums, out);
    }
};

// Sums of bytes are exact; their scales are applied group by group, in ascending order.
template <Format FORMAT>
struct ByteKernel {
    static constexpr int ROWS = 6;

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        f32x16 sums[M][2];
        clear(sums);
        int groups = inputs / GROUP;
        later.split_into(groups);
        for (int g = 0; g < groups; g++, panel += group_bytes(FORMAT)) {
            later.some();
            i32x16 products[M][2];
            if constexpr (FORMAT == Format::INT8)
                multiply_bytes<M>(panel, rows, stride, inputs, g, products);
            else
                multiply_bits<M>(panel, rows, stride, g, products);
            const half* scales = (const half*)(panel + group_bytes(FORMAT)) - (FORMAT == Format::INT8 ? 1 : 2) * PANEL;
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                f32x16 d = widen_half(scales + v * LANES), least = {};
                if constexpr (FORMAT != Format::INT8) least = widen_half(scales + PANEL + v * LANES);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    const float* x = (const float*)(rows + m * stride + inputs) + g;
                    f32x16 product = to_float(products[m][v]);
                    sums[m][v] = fma(d * product, splat(x[0]), sums[m][v]);
                    if constexpr (FORMAT != Format::INT8)
                        sums[m][v] = fma(least, splat(x[groups]), sums[m][v]);
                }
            }
        }
        put(sums, out);
    }

    template <int M>
    static inline void multiply_bytes(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, int g,
                                      i32x16 (&products)[M][2]) {
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const int32_t* x = (const int32_t*)(rows + m * stride + inputs);
            products[m][0] = products[m][1] = splat(x[2 * (inputs / GROUP) + g]);
        }
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / 4; quad++) {
            const uint32_t* w = (const uint32_t*)panel + quad * PANEL;
            u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + LANES);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                uint32_t x = ((const uint32_t*)(rows + m * stride + g * GROUP))[quad];
                products[m][0] = dot4(products[m][0], w0, x);
                products[m][1] = dot4(products[m][1], w1, x);
            }
        }
    }

    template <int M>
    static inline void multiply_bits(const uint8_t* panel, const uint8_t* rows, size_t stride, int g,
                                     i32x16 (&products)[M][2]) {
        clear(products);
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / 4; quad++) {
            constexpr int BITS = FORMAT == Format::INT5 ? 5 : 4;
            u32x16 w0 = unpack<BITS>(panel, quad, 0), w1 = unpack<BITS>(panel, quad, 1);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                uint32_t x = ((const uint32_t*)(rows + m * stride + g * GROUP))[quad];
                products[m][0] = dot4(products[m][0], w0, x);
                products[m][1] = dot4(products[m][1], w1, x);
            }
        }
    }
};

template <class K, int M = K::ROWS>
inline Kernel kernel_for(int rows) {
    if constexpr (M > 1)
        if (rows < M) return kernel_for<K, M - 1>(rows);
    return K::template run<M>;
}

inline int most_rows(Format format) {
    return format == Format::F32 || format == Format::BF16 ? WordKernel<Bf16Words>::ROWS
                                                           : ByteKernel<Format::INT8>::ROWS;
}

inline Kernel kernel_for(Format format, int rows) {
    switch (format) {
        case Format::F32: return kernel_for<WordKernel<FloatWords>>(rows);
        case Format::BF16: return kernel_for<WordKernel<Bf16Words>>(rows);
        case Format::INT8: return kernel_for<ByteKernel<Format::INT8>>(rows);
        case Format::INT5: return kernel_for<ByteKernel<Format::INT5>>(rows);
        case Format::Q4K: return kernel_for<BlockKernel<4>>(rows);
        case Format::Q5K: return kernel_for<BlockKernel<5>>(rows);
        case Format::Q6K: return kernel_for<BlockKernel<6>>(rows);
        default: return kernel_for<ByteKernel<Format::INT4>>(rows);
    }
}

// How the rows of a product are cut into blocks, each of which is one call of a kernel.
class Blocks {
public:
    static constexpr int MOST = Tiles::MOST > WordKernel<Bf16Words>::ROWS ? Tiles::MOST : WordKernel<Bf16Words>::ROWS;
    static_assert(ByteKernel<Format::INT8>::ROWS <= MOST, "MOST are the rows of a block");

    Blocks(const Linear& layer, int rows, const Tiles& tiles) : layer_(layer), rows_(rows), tiles_(tiles.rows()) {
        int most = tiles_ ? tiles_ : most_rows(layer.format);
        count_ = (rows + most - 1) / most;
    }

    int count() const { return count_; }

    // Tiles always have all of their rows: those of the last block may be some of the block before.
    int first(int block) const {
        if (!tiles_) return (long)rows_ * block / count_;
        return (block + 1) * tiles_ < rows_ ? block * tiles_ : rows_ - tiles_;
    }

    int last(int block) const { return tiles_ ? first(block) + tiles_ : (long)rows_ * (block + 1) / count_; }

    Kernel kernel(int block) const {
        return tiles_ ? Tiles::kernel(tiles_) : kernel_for(layer_.format, last(block) - first(block));
    }

private:
    const Linear& layer_;
    int rows_, tiles_, count_;
};

// A thread's share of `units`, each of UNIT panels, times all rows.
//
// `finish(row, unit, sums)` takes [UNIT * PANEL] sums of one row, bias included.
template <int UNIT, class Finish>
inline void multiply(const Linear& layer, const uint8_t* inputs, int rows, int thread, int threads, Finish finish) {
    float sums[UNIT][Blocks::MOST * PANEL];
    size_t stride = row_bytes(layer), size = panel_bytes(layer.format, layer.inputs);
    Tiles tiles(layer, rows);
    Blocks blocks(layer, rows, tiles);
    long units = (layer.outputs + UNIT * PANEL - 1) / (UNIT * PANEL);
    for (long unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        for (int block = 0, row = 0; block < blocks.count(); block++) {
            int first = blocks.first(block);
            Kernel kernel = blocks.kernel(block);
            for (int part = 0; part < UNIT; part++) {
                const uint8_t* panel = layer.weight + (unit * UNIT + part) * size;
                size_t share = size / blocks.count();
                Prefetch later(panel + UNIT * size + block * share, share);
                kernel(panel, inputs + first * stride, stride, layer.inputs, later, sums[part]);
            }
            for (; row < blocks.last(block); row++) {
                float out[UNIT * PANEL];
                for (int part = 0; part < UNIT; part++)
                    std::memcpy(out + part * PANEL, sums[part] + (row - first) * PANEL, sizeof(float) * PANEL);
                if (layer.bias)
                    for (int i = 0; i < UNIT * PANEL; i++) out[i] += layer.bias[unit * UNIT * PANEL + i];
                finish(row, unit, out);
            }
        }
    }
}

}  // namespace tokenleap
