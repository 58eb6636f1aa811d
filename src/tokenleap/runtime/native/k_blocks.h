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
#elif defined(TOKENLEAP_AVX2)
    return eights<i32x8>([&](int i) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + i))); });
#elif defined(TOKENLEAP_NEON)
    uint8x16_t all = vld1q_u8(from);
    return (i32x16)widen_bits({(u16x8)vmovl_u8(vget_low_u8(all)), (u16x8)vmovl_high_u8(all)});
#else
    using u8x16 = uint8_t __attribute__((vector_size(16)));
    return __builtin_convertvector(load<u8x16>(from), i32x16);
#endif
}

inline i32x16 widen_signed(const uint8_t* from) {
#ifdef TOKENLEAP_AVX512
    return (i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(TOKENLEAP_AVX2)
    return eights<i32x8>([&](int i) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + i))); });
#elif defined(TOKENLEAP_NEON)
    i32x16 all = widen_unsigned(from) << 24;  // the sign comes first
    return all >> 24;
#else
    using i8x16 = int8_t __attribute__((vector_size(16)));
    return __builtin_convertvector(load<i8x16>(from), i32x16);
#endif
}

inline f32x16 widen_byte(const uint8_t* from) { return to_float(widen_unsigned(from)); }

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

// Kernels take sums of V vectors of outputs, of M rows each. All their loops are unrolled, else GCC would keep sums in
// memory.

// Of a panel's two vectors, those that are computed together, so that their sums stay in registers.
template <int M>
constexpr int PANEL_VECTORS = 2 * M <= SUMS ? 2 : 1;

template <class Vector, int V, int M>
inline void clear(Vector (&sums)[V][M]) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) sums[v][m] = Vector{};
}

template <int V, int M>
inline void put(const f32x16 (&sums)[V][M], float* out) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) store(out + m * 32 + v * LANES, sums[v][m]);
}

// Begin sums with a number of each row.
template <int V, int M>
inline void begin(const uint8_t* numbers, size_t stride, i32x16 (&sums)[V][M]) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) sums[v][m] = splat(*(const int32_t*)(numbers + m * stride));
}

// q of four inputs of sixteen outputs; INT4, INT5 and INT8 have the same bits.
template <int BITS>
inline u32x16 unpack(const uint8_t* group, int quad) {
    const uint32_t *words = (const uint32_t*)group, *more = words + 4 * 32;
    if constexpr (BITS == 8) return load<u32x16>(words + quad * 32);
    u32x16 q = (load<u32x16>(words + quad % 4 * 32) >> (quad < 4 ? 0 : 4)) & 0x0f0f0f0fu;
    if constexpr (BITS == 5) q |= ((load<u32x16>(more) >> quad) & 0x01010101u) << 4;
    if constexpr (BITS == 6) q |= ((load<u32x16>(more + quad % 2 * 32) >> (quad / 2 * 2)) & 0x03030303u) << 4;
    return q;
}

// Add to sums the products of quads FIRST to LAST - 1 of a group, times the same of M rows.
template <int BITS, int FIRST, int LAST, int V, int M>
inline void add_quads(const uint8_t* group, const uint8_t* rows, size_t stride, i32x16 (&products)[V][M]) {
#pragma GCC unroll 8
    for (int quad = FIRST; quad < LAST; quad++) {
        u32x16 w[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) w[v] = unpack<BITS>(group + v * 64, quad);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            uint32_t x = ((const uint32_t*)(rows + m * stride))[quad];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) products[v][m] = dot4<BITS>(products[v][m], w[v], x);
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) products[v][m] = total<BITS>(products[v][m]);
}

// Add to sums the products of a group, times the scales of its weights and of rows. With LEAST, add the rows' own sums
// of a group, `sums_at` bytes after their scales, times the least numbers of the weights.
template <bool LEAST, int M>
inline void add_scaled(const i32x16 (&products)[M], f32x16 d, f32x16 least, const uint8_t* scales, size_t stride,
                       size_t sums_at, f32x16 (&sums)[M]) {
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
        const uint8_t* x = scales + m * stride;
        sums[m] = fma(d * to_float(products[m]), splat(*(const float*)x), sums[m]);
        if constexpr (LEAST) sums[m] = fma(least, splat(*(const float*)(x + sums_at)), sums[m]);
    }
}

template <int BITS>
struct BlockKernel {
    static constexpr int ROWS = 6;

    template <int M, class Prefetch>
    static void run(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch ahead, float* out) {
        constexpr int V = PANEL_VECTORS<M>;
        f32x16 sums[2][M];
        clear(sums);
        int groups = inputs / 32;
        const uint8_t* row_halves = rows + inputs + 3 * groups * sizeof(float);
        const uint8_t* blocks = panel + groups * k_group_bytes(BITS);
        ahead.split_into(groups);
        for (int g = 0; g < groups; g++, panel += k_group_bytes(BITS)) {
            ahead.some();
            const uint8_t* block = blocks + g / BLOCK_GROUPS * k_block_bytes(BITS);
            const uint8_t* scales = panel + k_group_bytes(BITS) - 2 * 32;
            const uint8_t *group = rows + g * 32, *row_scales = rows + inputs + g * sizeof(float);
#pragma GCC unroll 2
            for (int first = 0; first < 2; first += V) {
                i32x16 products[V][M];
                clear(products);
                if constexpr (BITS == 6)
                    add_halves(panel + first * 64, scales + first * LANES, group, row_halves + g * 8, stride, products);
                else
                    add_quads<BITS, 0, 8>(panel + first * 64, group, stride, products);
#pragma GCC unroll 2
                for (int v = first; v < first + V; v++) {
                    f32x16 d = widen_half((const half*)block + v * LANES), least = {};
                    if constexpr (BITS != 6) {
                        d *= widen_byte(scales + v * LANES);
                        least = -(widen_half((const half*)block + 32 + v * LANES) * widen_byte(scales + 32 + v * LANES));
                    }
                    add_scaled<BITS != 6>(products[v - first], d, least, row_scales, stride, groups * sizeof(float), sums[v]);
                }
            }
        }
        put(sums, out);
    }

    // The scales of both halves of a group are whole numbers, so the sum stays exact: at most 2^25. `row_halves` are what
    // `put_halves` has added to the rows.
    template <int V, int M>
    static inline void add_halves(const uint8_t* panel, const uint8_t* scales, const uint8_t* rows,
                                  const uint8_t* row_halves, size_t stride, i32x16 (&products)[V][M]) {
        add_half<0>(panel, scales, rows, row_halves, stride, products);
        add_half<1>(panel, scales + 32, rows, row_halves + sizeof(int32_t), stride, products);
    }

    template <int PART, int V, int M>
    static inline void add_half(const uint8_t* panel, const uint8_t* scales, const uint8_t* rows,
                                const uint8_t* row_halves, size_t stride, i32x16 (&products)[V][M]) {
        i32x16 sums[V][M];
        begin(row_halves, stride, sums);
        add_quads<BITS, 4 * PART, 4 * PART + 4>(panel, rows, stride, sums);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            i32x16 scale = widen_signed(scales + v * LANES);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) products[v][m] += scale * sums[v][m];
        }
    }
};

}  // namespace tokenleap
