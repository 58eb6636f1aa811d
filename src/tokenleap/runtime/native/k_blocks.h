// Linear layers in the numbers of GGUF's K-quants, which have blocks of 256 inputs.
//
// A weight is d s q - e m (Q4K, Q5K) or d s (q - 32) (Q6K). q has four to six bits, s and m are whole
// numbers of a group of 32 inputs (Q6K: s of 16), and d and e are those of a block.
//
//   format  weights of a panel: [K/32] groups, then [K/256] blocks
//   Q4K     ([4][32][4] bits 0 to 3, two in a byte; [32] uint8: s; [32] uint8: m), ([32] half: d; [32] half: e)
//   Q5K     the same with [32][4] bit 4 of all eight words after bits 0 to 3
//   Q6K     ([4][32][4] bits 0 to 3; [2][32][4] bits 4 and 5; [2][32] int8: s), ([32] half: d)
//
// Input rows are `Bytes` (formats.h). For Q6K, they have [K/32][2] int32 after them: -32 times the sums of
// each half of a group.

#pragma once

#include "simd.h"

namespace tokenleap {

constexpr int BLOCK_GROUPS = 8;  // of a block

inline size_t k_group_bytes(int bits) {
    return 32 * 32 / 2 + 2 * 32 + (bits == 5 ? 32 * 4 : bits == 6 ? 2 * 32 * 4 : 0);
}

inline size_t k_block_bytes(int bits) { return 2 * 32 * (bits == 6 ? 1 : 2); }

inline size_t k_panel_bytes(int bits, int inputs) {
    int groups = inputs / 32;
    return groups * k_group_bytes(bits) + groups / BLOCK_GROUPS * k_block_bytes(bits);
}

inline i32x16 widen_unsigned(const uint8_t* from) {
#ifdef TOKENLEAP_AVX512
    return (i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    using u8x16 = uint8_t __attribute__((vector_size(16)));
    return __builtin_convertvector(load<u8x16>(from), i32x16);
#endif
}

inline i32x16 widen_signed(const uint8_t* from) {
#ifdef TOKENLEAP_AVX512
    return (i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    using i8x16 = int8_t __attribute__((vector_size(16)));
    return __builtin_convertvector(load<i8x16>(from), i32x16);
#endif
}

inline f32x16 widen_byte(const uint8_t* from) { return __builtin_convertvector(widen_unsigned(from), f32x16); }

// Put what Q6K adds to an input row, whose group of 32 bytes is there already.
inline void put_halves(uint8_t* row, int inputs, int offset) {
    int groups = inputs / 32, group = offset / 32;
    int32_t* halves = (int32_t*)(row + inputs) + 3 * groups + 2 * group;
    for (int half = 0; half < 2; half++) {
        int32_t total = 0;
        for (int i = 0; i < 16; i++) total += (int8_t)row[offset + 16 * half + i];
        halves[half] = -32 * total;
    }
}

// q of four inputs of sixteen outputs; INT4 and INT5 have the same bits.
template <int BITS>
inline u32x16 unpack(const uint8_t* group, int quad, int v) {
    const uint32_t* words = (const uint32_t*)group + v * LANES;
    const uint32_t* more = words + 4 * 32;
    u32x16 q = (load<u32x16>(words + quad % 4 * 32) >> (quad < 4 ? 0 : 4)) & 0x0f0f0f0fu;
    if constexpr (BITS == 5) q |= ((load<u32x16>(more) >> quad) & 0x01010101u) << 4;
    if constexpr (BITS == 6) q |= ((load<u32x16>(more + quad % 2 * 32) >> (quad / 2 * 2)) & 0x03030303u) << 4;
    return q;
}

template <int BITS>
struct BlockKernel {
    static constexpr int ROWS = 6;

    template <int M, class Prefetch>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch later, float* out) {
        f32x16 sums[M][2] = {};
        int groups = inputs / 32;
        const uint8_t* blocks = panel + groups * k_group_bytes(BITS);
        later.split_into(groups);
        for (int g = 0; g < groups; g++, panel += k_group_bytes(BITS)) {
            later.some();
            const uint8_t* block = blocks + g / BLOCK_GROUPS * k_block_bytes(BITS);
            const uint8_t* scales = panel + k_group_bytes(BITS) - 2 * 32;
            i32x16 products[M][2];
            if constexpr (BITS == 6) multiply_halves<M>(panel, scales, rows, stride, inputs, g, products);
            else multiply_group<M>(panel, rows, stride, g, products);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                f32x16 d = widen_half((const half*)block + v * LANES), least = {};
                if constexpr (BITS != 6) {
                    d *= widen_byte(scales + v * LANES);
                    least = -(widen_half((const half*)block + 32 + v * LANES) * widen_byte(scales + 32 + v * LANES));
                }
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    const float* x = (const float*)(rows + m * stride + inputs) + g;
                    f32x16 product = __builtin_convertvector(products[m][v], f32x16);
                    sums[m][v] = fma(d * product, splat(x[0]), sums[m][v]);
                    if constexpr (BITS != 6) sums[m][v] = fma(least, splat(x[groups]), sums[m][v]);
                }
            }
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 2; v++) store(out + m * 32 + v * LANES, sums[m][v]);
    }

    template <int M>
    static inline void add_quads(const uint8_t* panel, const uint8_t* rows, size_t stride, int g, int first, int last,
                                 i32x16 (&products)[M][2]) {
#pragma GCC unroll 8
        for (int quad = first; quad < last; quad++) {
            u32x16 w0 = unpack<BITS>(panel, quad, 0), w1 = unpack<BITS>(panel, quad, 1);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                uint32_t x = ((const uint32_t*)(rows + m * stride + g * 32))[quad];
                products[m][0] = dot4(products[m][0], w0, x);
                products[m][1] = dot4(products[m][1], w1, x);
            }
        }
    }

    template <int M>
    static inline void multiply_group(const uint8_t* panel, const uint8_t* rows, size_t stride, int g,
                                      i32x16 (&products)[M][2]) {
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) products[m][0] = products[m][1] = i32x16{};
        add_quads<M>(panel, rows, stride, g, 0, 8, products);
    }

    // The scales of both halves are whole numbers, so the sum stays exact: at most 2^25.
    template <int M>
    static inline void multiply_halves(const uint8_t* panel, const uint8_t* scales, const uint8_t* rows, size_t stride,
                                       int inputs, int g, i32x16 (&products)[M][2]) {
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) products[m][0] = products[m][1] = i32x16{};
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            i32x16 sums[M][2];
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const int32_t* x = (const int32_t*)(rows + m * stride + inputs) + 3 * (inputs / 32);
                sums[m][0] = sums[m][1] = splat(x[2 * g + part]);
            }
            add_quads<M>(panel, rows, stride, g, 4 * part, 4 * part + 4, sums);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                i32x16 scale = widen_signed(scales + part * 32 + v * LANES);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) products[m][v] += scale * sums[m][v];
            }
        }
    }
};

}  // namespace tokenleap
