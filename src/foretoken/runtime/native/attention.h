// Attention of a few queries over the KV slab.
//
// A query sees a prefix of its row's slots. In a token tree it also sees some slots behind the
// prefix: its ancestors and itself. Ranks number these slots by position. Every score is one dot
// product, and the weighted sum of values runs over the ranks in ascending order. So a node of a tree
// gets the same bits as the same tokens in a chain, and a chain gets those of plain decoding
// (invariant 7). With a window, the first ranks are not seen: their weights are 0, which changes no sum.

#pragma once

#include <cmath>

#include "linear.h"

namespace foretoken {

constexpr int QUERIES = 24;  // of one task at most; keys and values are read once for all of them

// What one node sees: slots 0 to prefix - 1, then those of the tail; of these, ranks from `first` on.
struct Sight {
    const int32_t* tail;
    int32_t tail_length;
    int32_t prefix;
    int32_t first;

    int count() const { return prefix + tail_length; }
    int slot(int rank) const { return rank < prefix ? rank : tail[rank - prefix]; }
};

struct FloatCache : FloatWords {
    using Element = float;

    static f32x16 values(const Element* from) { return load<f32x16>(from); }
    static void write(const float* from, Element* to) { store(to, load<f32x16>(from)); }
};

struct Bf16Cache : Bf16Words {
    using Element = bf16;

    static f32x16 values(const Element* from) { return widen(from); }
    static void write(const float* from, Element* to) { store(to, narrow(load<f32x16>(from))); }
};

// 16 rows of 16 words -> 16 columns.
inline void transpose(const uint32_t* const (&rows)[LANES], int offset, u32x16* columns) {
#ifdef FORETOKEN_AVX512
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = (__m512i)load<u32x16>(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        columns[i] = (u32x16)_mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        columns[i + 8] = (u32x16)_mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        columns[i + 4] = (u32x16)_mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        columns[i + 12] = (u32x16)_mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
#else
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) columns[j][i] = rows[i][offset + j];
#endif
}

template <class Cache, int D>
struct Attention {
    using Element = typename Cache::Element;
    static constexpr int WORDS = D / Cache::PER_WORD;
    static constexpr int PARTS = D / LANES;
    static constexpr int AT_ONCE = 24 / PARTS;  // queries whose sums fit into registers

    const Element* keys;    // [slots][D]
    const Element* values;  // [slots][D]
    const Sight* sights;    // of each query
    int count;              // queries
    float scaling;
    float* scores;  // [count][stride]
    long stride;
    alignas(64) Element queries[QUERIES][D];

    // out: [count][D]
    void run(const float* const* from, float (*out)[D]) {
        for (int q = 0; q < count; q++)
            for (int part = 0; part < D; part += LANES) Cache::write(from[q] + part, queries[q] + part);
        int shared = sights[0].prefix, low = sights[0].first;  // slots that every query sees; windows begin
        for (int q = 1; q < count; q++) {
            shared = sights[q].prefix < shared ? sights[q].prefix : shared;
            low = sights[q].first < low ? sights[q].first : low;
        }
        low = low / LANES * LANES;
        shared = shared / LANES * LANES;
        if (shared < low) shared = low;
        Sight all{nullptr, 0, shared, 0};
        for (int rank = low; rank < shared; rank += LANES) score(all, rank, 0, count);
        for (int q = 0; q < count; q++)
            for (int rank = shared; rank < sights[q].count(); rank += LANES) score(sights[q], rank, q, q + 1);
        float totals[QUERIES];
        for (int q = 0; q < count; q++) {
            for (int rank = low; rank < sights[q].first; rank++) scores[q * stride + rank] = -INFINITY;
            totals[q] = exponentiate(scores + q * stride, low, sights[q].count());
        }
        for (int q = 0; q < count;) q += sum_values(q, low, shared, out);
        for (int q = 0; q < count; q++)
            for (int d = 0; d < D; d++) out[q][d] /= totals[q];
    }

    // Scores of sixteen keys for queries `first` to `last` - 1.
    void score(const Sight& sight, int rank, int first, int last) {
        const uint32_t* rows[LANES];
        int last_rank = sight.count() - 1;
        for (int i = 0; i < LANES; i++) {
            int at = rank + i < last_rank ? rank + i : last_rank;  // scores beyond the end are ignored
            rows[i] = (const uint32_t*)(keys + (long)sight.slot(at) * D);
        }
        u32x16 columns[WORDS];
        for (int offset = 0; offset < WORDS; offset += LANES) transpose(rows, offset, columns + offset);
        for (int q = first; q < last; q++) {
            const uint32_t* query = (const uint32_t*)queries[q];
            f32x16 even = {}, odd = {};
#pragma GCC unroll 16
            for (int word = 0; word < WORDS; word += 2) {
                even = Cache::dot(even, columns[word], query[word]);
                odd = Cache::dot(odd, columns[word + 1], query[word + 1]);
            }
            store(scores + q * stride + rank, (even + odd) * scaling);
        }
    }

    // Softmax from rank `first` on, without the division; returns the sum.
    static float exponentiate(float* row, int first, int count) {
        for (int i = count; i % LANES; i++) row[i] = -INFINITY;
        f32x16 most = splat(-INFINITY), total = {};
        for (int i = first; i < count; i += LANES) most = max(most, load<f32x16>(row + i));
        float largest = max(most);
        for (int i = first; i < count; i += LANES) {
            f32x16 weight = exp(load<f32x16>(row + i) - largest);
            store(row + i, weight);
            total += weight;
        }
        return sum(total);
    }

    // Sum values for as many queries as fit into registers, from `first` on; returns how many.
    int sum_values(int first, int low, int shared, float (*out)[D]) {
        int left = count - first;
        if (AT_ONCE >= 6 && left >= 6) return sum_values<6>(first, low, shared, out);
        if (AT_ONCE >= 4 && left >= 4) return sum_values<4>(first, low, shared, out);
        if (AT_ONCE >= 3 && left >= 3) return sum_values<3>(first, low, shared, out);
        if (left >= 2) return sum_values<2>(first, low, shared, out);
        return sum_values<1>(first, low, shared, out);
    }

    template <int Q>
    int sum_values(int first, int low, int shared, float (*out)[D]) {
        f32x16 sums[Q][PARTS] = {};
        for (int rank = low; rank < shared; rank++) {
            f32x16 value[PARTS];
            for (int part = 0; part < PARTS; part++)
                value[part] = Cache::values(values + (long)rank * D + part * LANES);
#pragma GCC unroll 6
            for (int q = 0; q < Q; q++) {
                f32x16 weight = splat(scores[(first + q) * stride + rank]);
                for (int part = 0; part < PARTS; part++) sums[q][part] = fma(weight, value[part], sums[q][part]);
            }
        }
        for (int q = 0; q < Q; q++) {
            const Sight& sight = sights[first + q];
            for (int rank = shared; rank < sight.count(); rank++) {
                f32x16 weight = splat(scores[(first + q) * stride + rank]);
                const Element* row = values + (long)sight.slot(rank) * D;
                for (int part = 0; part < PARTS; part++)
                    sums[q][part] = fma(weight, Cache::values(row + part * LANES), sums[q][part]);
            }
            for (int part = 0; part < PARTS; part++) store(out[first + q] + part * LANES, sums[q][part]);
        }
        return Q;
    }
};

}  // namespace foretoken
