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
    static constexpr int ROWS = std::min(12, Words::PER_WORD == 1 ? SUMS : SUMS - 2);

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch ahead, float* out) {
        constexpr int V = PANEL_VECTORS<M>;
        int words = inputs / Words::PER_WORD;
        ahead.split_into(words / 8);
        for (int first = 0; first < 2; first += V) {
            f32x16 sums[V][M];
            clear(sums);
            const uint32_t* w = (const uint32_t*)panel + first * LANES;
            for (int k = 0; k < words; k++, w += PANEL) {
                if (k % 8 == 0) ahead.some();
                add_words(w, rows + k * sizeof *w, stride, sums);
            }
            put(sums, out + first * LANES);
        }
    }

    template <int V, int M>
    static inline void add_words(const uint32_t* words, const uint8_t* rows, size_t stride, f32x16 (&sums)[V][M]) {
        u32x16 w[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) w[v] = load<u32x16>(words + v * LANES);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            uint32_t x = *(const uint32_t*)(rows + m * stride);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sums[v][m] = Words::dot(sums[v][m], w[v], x);
        }
    }
};

// Sums of bytes are exact; their scales are applied group by group, in ascending order.
template <Format FORMAT>
struct ByteKernel {
    static constexpr int BITS = FORMAT == Format::INT8 ? 8 : FORMAT == Format::INT5 ? 5 : 4;
    static constexpr int ROWS = std::min(6, BITS < 8 ? SUMS : SUMS - 2);

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch ahead, float* out) {
        constexpr int V = PANEL_VECTORS<M>;
        constexpr bool LEAST = FORMAT != Format::INT8;
        f32x16 sums[2][M];
        clear(sums);
        int groups = inputs / GROUP;
        size_t part = groups * sizeof(float);  // of what stands after a row's bytes
        ahead.split_into(groups);
        for (int g = 0; g < groups; g++, panel += group_bytes(FORMAT)) {
            ahead.some();
            const uint8_t* row_scales = rows + inputs + g * sizeof(float);
            const half* scales = (const half*)(panel + group_bytes(FORMAT)) - (LEAST ? 2 : 1) * PANEL;
#pragma GCC unroll 2
            for (int first = 0; first < 2; first += V) {
                i32x16 products[V][M];
                if constexpr (LEAST) clear(products);
                else begin(row_scales + 2 * part, stride, products);
                add_quads<BITS, 0, GROUP / 4>(panel + first * 64, rows + g * GROUP, stride, products);
#pragma GCC unroll 2
                for (int v = first; v < first + V; v++) {
                    f32x16 d = widen_half(scales + v * LANES), least = {};
                    if constexpr (LEAST) least = widen_half(scales + PANEL + v * LANES);
                    add_scaled<LEAST>(products[v - first], d, least, row_scales, stride, part, sums[v]);
                }
            }
        }
        put(sums, out);
    }
};

template <class K, int M = K::ROWS>
inline Kernel kernel_for(int rows) {
    if constexpr (M > 1)
        if (rows < M) return kernel_for<K, M - 1>(rows);
    return K::template run<M>;
}

// What `use` says of the kernels of a format.
template <class Use>
inline auto with_kernels(Format format, Use use) {
    switch (format) {
        case Format::F32: return use(WordKernel<FloatWords>());
        case Format::BF16: return use(WordKernel<Bf16Words>());
        case Format::INT8: return use(ByteKernel<Format::INT8>());
        case Format::INT5: return use(ByteKernel<Format::INT5>());
        case Format::Q4K: return use(BlockKernel<4>());
        case Format::Q5K: return use(BlockKernel<5>());
        case Format::Q6K: return use(BlockKernel<6>());
        default: return use(ByteKernel<Format::INT4>());
    }
}

inline int most_rows(Format format) {
    return with_kernels(format, [](auto kernels) { return int(decltype(kernels)::ROWS); });
}

inline Kernel kernel_for(Format format, int rows) {
    return with_kernels(format, [=](auto kernels) { return kernel_for<decltype(kernels)>(rows); });
}

// How the rows of a product are cut into blocks, each of which is one call of a kernel.
class Blocks {
public:
    static constexpr int MOST = std::max(Tiles::MOST, 12);

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
    bool passing = layer.passing && rows <= 8;  // the inputs of more rows need the first cache
    long units = (layer.outputs + UNIT * PANEL - 1) / (UNIT * PANEL);
    for (long unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        for (int block = 0, row = 0; block < blocks.count(); block++) {
            int first = blocks.first(block);
            Kernel kernel = blocks.kernel(block);
            for (int part = 0; part < UNIT; part++) {
                const uint8_t* panel = layer.weight + (unit * UNIT + part) * size;
                size_t share = size / blocks.count();
                Prefetch ahead = blocks.count() == 1 ? Prefetch::soon(panel, size, passing)
                                                     : Prefetch::later(panel + UNIT * size + block * share, share);
                kernel(panel, inputs + first * stride, stride, layer.inputs, ahead, sums[part]);
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
