// Linear layers over packed weights, in eight formats.
//
// A weight [N, K] is cut into panels of 32 outputs. A panel is stored in the order in which kernels
// read it, and is read once for up to ROWS input rows. Every output is one sum over k in ascending
// order. So its bits do not depend on the other rows (invariant 7). This needs no padding, not even
// for a single row.
//
//   format  weights of a panel                                                  input row
//   F32     [K][32] float32                                                     float32
//   BF16    [K/2][32][2] bfloat16                                               bfloat16
//   INT8    [K/32] of ([8][32][4] uint8: w/d + 128; [32] half: d)               Bytes
//   INT4    [K/32] of ([4][32][4] two nibbles: (w-m)/d; [32] half: d; half: m)  Bytes
//   INT5    the same with bit 4 of all words, [32][4], behind the nibbles       Bytes
//
//   Q4K, Q5K, Q6K   see k_blocks.h                                              Bytes
//
// `Bytes` are int8 in groups of 32 with one scale each, quantized from the input row at run time.

#pragma once

#include "k_blocks.h"

namespace foretoken {

constexpr int PANEL = 32;
constexpr int GROUP = 32;

enum class Format : int32_t { F32, BF16, INT8, INT4, INT5, Q4K, Q5K, Q6K };

// Bits of a weight of a K-quant; 0 for other formats.
inline int k_bits(Format format) { return format < Format::Q4K ? 0 : 4 + (int)format - (int)Format::Q4K; }

// `CLinear` in pack.py has the same layout.
struct Linear {
    const uint8_t* weight;
    const float* bias;  // [outputs] or null
    Format format;
    int32_t inputs;
    int32_t outputs;  // multiple of PANEL but for the head's last panel
    Format rows;      // of its inputs: its own, or the highest of those beside it that read Bytes
};

// Sizes

inline size_t group_bytes(Format format) {
    if (format == Format::INT8) return GROUP * PANEL + 2 * PANEL;
    return GROUP * PANEL / 2 + (format == Format::INT5 ? GROUP * PANEL / 8 : 0) + 4 * PANEL;
}

inline size_t panel_bytes(Format format, int inputs) {
    if (format == Format::F32) return sizeof(float) * PANEL * inputs;
    if (format == Format::BF16) return sizeof(bf16) * PANEL * inputs;
    if (int bits = k_bits(format)) return k_panel_bytes(bits, inputs);
    return group_bytes(format) * (inputs / GROUP);
}

// A row of Bytes: [K] int8, then [K/32] each of scale, scale * sum and -128 * sum.
inline size_t row_bytes(Format format, int inputs) {
    size_t size = format == Format::F32    ? sizeof(float) * inputs
                  : format == Format::BF16 ? sizeof(bf16) * inputs
                                           : inputs + (format == Format::Q6K ? 5 : 3) * sizeof(float) * (inputs / GROUP);
    return (size + 63) / 64 * 64;
}

inline size_t row_bytes(const Linear& layer) { return row_bytes(layer.rows, layer.inputs); }

// Inputs

inline void quantize(const float* from, uint8_t* row, int inputs, int offset) {
    f32x16 low = load<f32x16>(from), high = load<f32x16>(from + LANES);
    float largest = max(max(max(low, -low), max(high, -high)));
    float steps = largest > 1e-30f ? 127.0f / largest : 0.0f;
    i32x16 first = nearest(low * steps), second = nearest(high * steps);
    store_bytes((int8_t*)row + offset, first);
    store_bytes((int8_t*)row + offset + LANES, second);
    int32_t total = sum(first + second);
    int groups = inputs / GROUP, group = offset / GROUP;
    float* scales = (float*)(row + inputs);
    // Integers cannot represent NaN or infinity, so the scale carries them to the output.
    float scale = largest / 127.0f + 0.0f * sum(low + high);
    scales[group] = scale;
    scales[groups + group] = scale * total;
    ((int32_t*)scales)[2 * groups + group] = -128 * total;
}

// Put `count` values at `offset` of an input row of a layer; both are multiples of GROUP.
inline void encode(const Linear& layer, const float* from, uint8_t* row, int offset, int count) {
    Format format = layer.rows;
    for (int i = 0; i < count; i += GROUP) {
        if (format == Format::F32) {
            std::memcpy((float*)row + offset + i, from + i, sizeof(float) * GROUP);
        } else if (format == Format::BF16) {
            for (int part = 0; part < GROUP; part += LANES)
                store((bf16*)row + offset + i + part, narrow(load<f32x16>(from + i + part)));
        } else {
            quantize(from + i, row, layer.inputs, offset + i);
            if (format == Format::Q6K) put_halves(row, layer.inputs, offset + i);
        }
    }
}

// Kernels: a panel times M rows, [M][PANEL] out.
//
// While a kernel computes, it prefetches a later panel. With several rows, computing takes as long
// as reading, and the processor's own prefetching does not look far enough ahead to overlap both.

class Prefetch {
public:
    Prefetch(const uint8_t* from, size_t bytes) : from_(from), end_(from + bytes) {}

    // Spread the prefetch over this many calls of `some`.
    void split_into(int parts) { step_ = ((end_ - from_) / 64 + parts - 1) / parts * 64; }

    void some() {
        for (const uint8_t* stop = from_ + step_; from_ < stop; from_ += 64) __builtin_prefetch(from_);
    }

private:
    const uint8_t *from_, *end_;
    long step_ = 0;
};

using Kernel = void (*)(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out);

template <int M>
inline void put(const f32x16 (&sums)[M][2], float* out) {
    for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++) store(out + m * PANEL + v * LANES, sums[m][v]);
}

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
    static constexpr int ROWS = 12;

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        f32x16 sums[M][2] = {};
        int words = inputs / Words::PER_WORD;
        later.split_into(words / 8);
        for (int k = 0; k < words; k++) {
            if (k % 8 == 0) later.some();
            const uint32_t* w = (const uint32_t*)panel + k * PANEL;
            u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + LANES);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                uint32_t x = ((const uint32_t*)(rows + m * stride))[k];
                sums[m][0] = Words::dot(sums[m][0], w0, x);
                sums[m][1] = Words::dot(sums[m][1], w1, x);
            }
        }
        put<M>(sums, out);
    }
};

// Sums of bytes are exact; their scales are applied group by group, in ascending order.
template <Format FORMAT>
struct ByteKernel {
    static constexpr int ROWS = 6;

    template <int M>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        f32x16 sums[M][2] = {};
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
                    f32x16 product = __builtin_convertvector(products[m][v], f32x16);
                    sums[m][v] = fma(d * product, splat(x[0]), sums[m][v]);
                    if constexpr (FORMAT != Format::INT8)
                        sums[m][v] = fma(least, splat(x[groups]), sums[m][v]);
                }
            }
        }
        put<M>(sums, out);
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
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) products[m][0] = products[m][1] = i32x16{};
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

// A thread's share of `units`, each of UNIT panels, times all rows.
//
// `finish(row, unit, sums)` takes [UNIT * PANEL] sums of one row, bias included.
template <int UNIT, class Finish>
inline void multiply(const Linear& layer, const uint8_t* inputs, int rows, int thread, int threads, Finish finish) {
    constexpr int MOST = WordKernel<Bf16Words>::ROWS;
    static_assert(ByteKernel<Format::INT8>::ROWS <= MOST);
    float sums[UNIT][MOST * PANEL];
    size_t stride = row_bytes(layer), size = panel_bytes(layer.format, layer.inputs);
    int blocks = (rows + most_rows(layer.format) - 1) / most_rows(layer.format);
    long units = (layer.outputs + UNIT * PANEL - 1) / (UNIT * PANEL);
    for (long unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        for (int block = 0; block < blocks; block++) {
            int first = (long)rows * block / blocks, last = (long)rows * (block + 1) / blocks;
            Kernel kernel = kernel_for(layer.format, last - first);
            for (int part = 0; part < UNIT; part++) {
                const uint8_t* panel = layer.weight + (unit * UNIT + part) * size;
                size_t share = size / blocks;
                Prefetch later(panel + UNIT * size + block * share, share);
                kernel(panel, inputs + first * stride, stride, layer.inputs, later, sums[part]);
            }
            for (int row = first; row < last; row++) {
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

}  // namespace foretoken
