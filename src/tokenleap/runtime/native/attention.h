// Attention of a few queries over the KV slab.
//
// A query sees a prefix of its row's slots. In a token tree it also sees some slots after the
// prefix: its ancestors and itself. Ranks number these slots by position. Every score is one dot
// product, and the weighted sum of values runs over the ranks in ascending order; tiles add 32 of them
// at a time, each in an order of their own. So a node of a tree gets the same bits as the same tokens in
// a chain, and a chain gets those of plain decoding (invariant 7). With a window, the first ranks are not
// seen: their weights are 0, which changes no sum of numbers.

#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace tokenleap {

constexpr int QUERIES = 96;   // of one task at most; keys and values are read once for all of them

// What one node sees: slots 0 to prefix - 1, then those of the tail; of these, ranks from `first` on.
struct Sight {
    const int32_t* tail;
    int32_t tail_length;
    int32_t prefix;
    int32_t first;
    int32_t position = 0;         // rank of the node itself, if there is a bias
    const float* bias = nullptr;  // added to scores, by the distance from a rank to the node; null for none

    int count() const { return prefix + tail_length; }
    int slot(int rank) const { return rank < prefix ? rank : tail[rank - prefix]; }

    bool sees_as(const Sight& other) const {
        return tail == other.tail && tail_length == other.tail_length && prefix == other.prefix;
    }
};

// How keys and values are stored. A word has the weights, or the values of a dimension, of PER_WORD ranks.
struct FloatCache : FloatWords {
    using Element = float;

    static void write(const float* from, Element* to) { store(to, load<f32x16>(from)); }
    static void write_weights(f32x16 weights, Element* to) { store(to, weights); }
    static u32x16 words(const Element* value, const Element*) { return load<u32x16>(value); }
};

struct Bf16Cache : Bf16Words {
    using Element = bf16;

    static void write(const float* from, Element* to) { store(to, narrow(load<f32x16>(from))); }
    static void write_weights(f32x16 weights, Element* to) { store(to, narrow_normal(weights)); }

    // The second may be null: then it counts as 0.
    static u32x16 words(const Element* first, const Element* second) {
        u32x16 low = widen_bits(load<u16x16>(first));
        return second ? low | widen_bits(load<u16x16>(second)) << 16 : low;
    }
};

#ifdef TOKENLEAP_AVX2
// 8 rows of 8 words -> 8 columns.
inline void transpose_eight(const uint32_t* const* rows, int offset, u32x8 (&columns)[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load<__m256i>(rows[i] + offset);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        columns[i] = (u32x8)_mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
        columns[i + 4] = (u32x8)_mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    }
}
#elif defined(TOKENLEAP_NEON)
// 4 rows of 4 words -> 4 columns.
inline void transpose_four(const uint32_t* const* rows, int offset, u32x4 (&columns)[4]) {
    uint32x4_t a[4];
    for (int i = 0; i < 4; i++) a[i] = vld1q_u32(rows[i] + offset);
    for (int i = 0; i < 2; i++) {
        uint64x2_t even = (uint64x2_t)(i ? vtrn2q_u32(a[0], a[1]) : vtrn1q_u32(a[0], a[1]));
        uint64x2_t odd = (uint64x2_t)(i ? vtrn2q_u32(a[2], a[3]) : vtrn1q_u32(a[2], a[3]));
        columns[i] = (u32x4)vtrn1q_u64(even, odd);
        columns[i + 2] = (u32x4)vtrn2q_u64(even, odd);
    }
}
#endif

// 16 rows of 16 words -> 16 columns.
inline void transpose(const uint32_t* const (&rows)[LANES], int offset, u32x16* columns) {
#ifdef TOKENLEAP_AVX512
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
#elif defined(TOKENLEAP_AVX2)
    for (int j = 0; j < LANES; j += 8) {
        u32x8 low[8], high[8];
        transpose_eight(rows, offset + j, low);
        transpose_eight(rows + 8, offset + j, high);
        for (int i = 0; i < 8; i++) columns[j + i] = {low[i], high[i]};
    }
#elif defined(TOKENLEAP_NEON)
    for (int j = 0; j < LANES; j += 4) {
        u32x4 fours[4][4];
        for (int i = 0; i < 4; i++) transpose_four(rows + 4 * i, offset + j, fours[i]);
        for (int i = 0; i < 4; i++) columns[j + i] = {{fours[0][i], fours[1][i]}, {fours[2][i], fours[3][i]}};
    }
#else
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) columns[j][i] = rows[i][offset + j];
#endif
}

// TILED: products are those of tiles (tiles.h), for all queries, since their bits are others.
template <class Cache, int D, bool TILED = false>
struct Attention {
    using Element = typename Cache::Element;
    static constexpr int TOGETHER = TILED ? TileShapes::HEIGHT : 6;  // queries whose scores are computed together
    static constexpr int CHUNK = 32;                 // ranks whose values tiles add at once
    static constexpr int WORDS = D / Cache::PER_WORD;
    static constexpr int PARTS = D / LANES;
    static constexpr int SLICE = SUMS < 24 ? 2 : PARTS;                    // vectors of values that are added together
    static constexpr int AT_ONCE = std::min(6, SUMS / SLICE);              // queries whose sums fit into registers
    static constexpr int STEP = Cache::PER_WORD;
    static constexpr int BLOCK = (D <= 64 ? 64 : D <= 128 ? 32 : 16) * STEP;  // ranks; their keys take 16 KB at most

    const Element* keys;    // [slots][D]
    const Element* values;  // [slots][D]
    const Sight* sights;    // of each query
    int count;              // queries
    float scaling, cap;     // scores become cap tanh(score / cap), unless it is 0
    int before = 0, behind = 0;  // biases are of distances -behind to before, and those of all larger ones, too
    alignas(64) Element queries[QUERIES][D];
    alignas(64) float out[QUERIES][D];  // the result
    f32x16 totals[QUERIES];             // of the weights so far
    float largest[QUERIES];             // of the scores so far

    // Of a block of ranks
    alignas(64) u32x16 columns[BLOCK / LANES][WORDS];  // keys
    alignas(64) uint32_t words[BLOCK / STEP][D];       // values
    alignas(64) float scores[TOGETHER][BLOCK];
    alignas(64) Element weights[TOGETHER][BLOCK];

    void run(const float* const* from) {
        int low = sights[0].first, most = 0;  // where windows begin; the ranks of the query that sees most
        shared = sights[0].prefix;
        chains = true;
        for (int q = 0; q < count; q++) {
            for (int part = 0; part < D; part += LANES) {
                Cache::write(from[q] + part, queries[q] + part);
                store(out[q] + part, f32x16{});
            }
            totals[q] = f32x16{};
            largest[q] = -INFINITY;
            low = std::min(low, sights[q].first);
            most = std::max(most, sights[q].count());
            shared = std::min(shared, sights[q].prefix);
            chains = chains && !sights[q].tail_length;
        }
        shared = chains ? most : shared / LANES * LANES;
        for (int rank = low / BLOCK * BLOCK; rank < most; rank += BLOCK) {
            transpose_keys(rank);
            gathered = TILED || count > AT_ONCE;
            if (gathered) gather_values(rank, most);
            for (int q = 0; q < count; q += TOGETHER) add_block(rank, q, std::min(q + TOGETHER, count));
        }
        for (int q = 0; q < count; q++) {
            float total = sum(totals[q]);
            for (int d = 0; d < D; d++) out[q][d] /= total;
        }
    }

private:
    int shared;     // every query's first slots, up to here, are the same as far as it sees them
    bool chains;    // whether no query has a tail
    bool gathered;  // whether `words` are those of this block
    bool broken;    // whether one of them is NaN or infinite: a weight of 0 does not leave it out (tiles only)

    // A block of ranks, for queries `first` to `last` - 1.
    void add_block(int rank, int first, int last) {
        int end = 0, prefix = sights[first].prefix;
        for (int q = first; q < last; q++) {
            end = std::max(end, sights[q].count());
            prefix = std::min(prefix, sights[q].prefix);
        }
        if (end <= rank) return;
        score(rank, std::min(end, rank + BLOCK), first, last);
        for (int q = first; q < last; q++) weigh(rank, q, q - first);
        if constexpr (TILED) {
            // Weights of what a query does not see are 0.
            bool whole = chains && !broken;
            int shared = whole ? end + CHUNK - 1 : prefix, both = std::min(BLOCK, shared / CHUNK * CHUNK - rank);
            if (both > 0)
                TileProducts<D>::add_values(weights[0], sizeof weights[0], words, both / CHUNK, out[first], sizeof out[0]);
            if (whole) return;
            for (int q = first; q < last; q++) add_own(rank, std::max(0, both), q, q - first);
        } else {
            int both = std::max(0, std::min(rank + BLOCK, prefix / STEP * STEP) - rank);  // ranks that all of them see
            for (int q = first; q < last;) q += add_values(rank, both, first, q, last);
            for (int q = first; q < last; q++) add_rest(rank, both, q, q - first);
        }
    }

    // Keys of a block, sixteen at a time, as columns
    void transpose_keys(int rank) {
        int end = std::min(rank + BLOCK, shared);
        for (int i = 0; rank + i < end; i += LANES) transpose_keys(Sight{nullptr, 0, shared, 0}, rank + i, columns[i / LANES]);
    }

    void transpose_keys(const Sight& sight, int rank, u32x16 (&to)[WORDS]) const {
        const uint32_t* rows[LANES];
        int last = sight.count() - 1;
        for (int i = 0; i < LANES; i++) {
            int at = std::min(rank + i, last);  // scores beyond the end are ignored
            rows[i] = (const uint32_t*)(keys + (long)sight.slot(at) * D);
        }
        for (int offset = 0; offset < WORDS; offset += LANES) transpose(rows, offset, to + offset);
    }

    // Scores: what they say of a slot that a query does not see is ignored.
    void score(int rank, int end, int first, int last) {
        int i = 0, both = std::min(end, shared) - rank;
        if (SUMS >= 24 || last - first < 3)
            for (; i + LANES < both; i += 2 * LANES) score<2>(columns + i / LANES, i, first, first, last);
        for (; i < both; i += LANES) score<1>(columns + i / LANES, i, first, first, last);
        if (chains) return;
        for (int q = first, next; q < last; q = next) {
            for (next = q + 1; next < last && sights[next].sees_as(sights[q]);) next++;
            for (int i = std::max(0, both); rank + i < std::min(end, sights[q].count()); i += LANES) {
                alignas(64) u32x16 own[1][WORDS];
                transpose_keys(sights[q], rank + i, own[0]);
                score<1>(own, i, first, q, next);
            }
        }
    }

    template <int VECTORS>
    void score(const u32x16 (*keys)[WORDS], int place, int base, int first, int last) {
        if constexpr (TILED) {
            alignas(64) float found[TOGETHER][VECTORS][LANES];
            TileProducts<D>::template scores<VECTORS>(queries[base], keys, found[0][0]);
            for (int q = first - base; q < last - base; q++)
                for (int v = 0; v < VECTORS; v++)
                    store(scores[q] + place + v * LANES, load<f32x16>(found[q][v]) * scaling);
            return;
        }
        for (int q = first; q < last;) {
            int left = last - q;
            if (left >= 6 && 12 * VECTORS <= SUMS) q += score<VECTORS, 6>(keys, place, base, q);
            else if (left >= 3 && 6 * VECTORS <= SUMS) q += score<VECTORS, 3>(keys, place, base, q);
            else q += score<VECTORS, 1>(keys, place, base, q);
        }
    }

    // Every score is the sum of two: of the even words' products, and of the odd ones'.
    template <int VECTORS, int Q>
    int score(const u32x16 (*keys)[WORDS], int place, int base, int first) {
        f32x16 even[Q][VECTORS], odd[Q][VECTORS];
        clear(even);
        clear(odd);
        for (int word = 0; word < WORDS; word += 2)
#pragma GCC unroll 6
            for (int q = 0; q < Q; q++) {
                const uint32_t* query = (const uint32_t*)queries[first + q];
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) {
                    even[q][v] = Cache::dot(even[q][v], keys[v][word], query[word]);
                    odd[q][v] = Cache::dot(odd[q][v], keys[v][word + 1], query[word + 1]);
                }
            }
#pragma GCC unroll 6
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                store(scores[first - base + q] + place + v * LANES, (even[q][v] + odd[q][v]) * scaling);
        return Q;
    }

    // Softmax without the division: scores of a block become weights. They are relative to the largest score so
    // far; when a block has a larger one, the sums are scaled down.
    void weigh(int rank, int q, int place) {
        float* row = scores[place];
        int first = sights[q].first - rank, end = std::min(BLOCK, sights[q].count() - rank);
        if (first >= BLOCK || end <= 0) {
            std::memset(weights[place], 0, sizeof weights[place]);
            return;
        }
        if (cap != 0)
            for (int i = 0; i < end; i += LANES) store(row + i, capped(load<f32x16>(row + i), cap));
        if (sights[q].bias) add_bias(sights[q].bias, sights[q].position - rank, end, row);
        for (int i = 0; i < first; i++) row[i] = -INFINITY;
        for (int i = end; i % LANES; i++) row[i] = -INFINITY;
        f32x16 most = load<f32x16>(row);
        for (int i = LANES; i < end; i += LANES) most = max(most, load<f32x16>(row + i));
        float before = largest[q], now = std::max(before, max(most));
        f32x16 total = totals[q];
        if (now > before) {
            f32x16 smaller = exp_of_negative(splat(before - now));
            total *= smaller;
            for (int d = 0; d < D; d += LANES) store(out[q] + d, load<f32x16>(out[q] + d) * smaller);
            largest[q] = now;
        }
        for (int i = 0; i < end; i += LANES) {
            f32x16 weight = exp_of_negative(load<f32x16>(row + i) - now);
            Cache::write_weights(weight, weights[place] + i);
            total += weight;
        }
        if (int i = (end + LANES - 1) / LANES * LANES; TILED && i < BLOCK)
            std::memset(weights[place] + i, 0, sizeof(Element) * (BLOCK - i));
        totals[q] = total;
    }

    // To the scores of ranks 0 to end - 1 of a block; that of distance 0 is `own`.
    void add_bias(const float* bias, int own, int end, float* row) const {
        int near = std::min(std::max(0, own - before), end), far = std::max(near, std::min(own + behind, end));
        for (int i = 0; i < near; i++) row[i] += bias[before];
        for (int i = near; i < far; i++) row[i] += bias[own - i];
        for (int i = far; i < end; i++) row[i] += bias[-behind];
    }

    uint32_t weight(int place, int word) const { return ((const uint32_t*)weights[place])[word]; }

    // Values

    void gather_values(int rank, int most) {
        if constexpr (TILED) {
            broken = chains && gather_words(Sight{nullptr, 0, most, 0}, rank, BLOCK, words);
            if (chains) return;
        }
        int seen = 0;
        for (int q = 0; q < count; q++) seen = std::max(seen, sights[q].prefix);
        int last = std::min(rank + BLOCK, seen / STEP * STEP);
        for (int i = rank; i < last; i += STEP)
            for (int d = 0; d < D; d += LANES) store(words[(i - rank) / STEP] + d, words_at(i, d));
    }

    // Words of `ranks` ranks, with 0 for those that are not seen. Returns whether a bfloat16 is NaN or infinite.
    bool gather_words(const Sight& sight, int rank, int ranks, uint32_t (*to)[D]) const {
        i32x16 found = {};
        for (int i = 0; i < ranks; i += STEP) {
            int left = sight.count() - rank - i;
            const Element* first = left > 0 ? values + (long)sight.slot(rank + i) * D : nullptr;
            const Element* second = left > 1 ? values + (long)sight.slot(rank + i + 1) * D : nullptr;
            for (int d = 0; d < D; d += LANES) {
                u32x16 x = first ? Cache::words(first + d, second ? second + d : nullptr) : u32x16{};
                found |= (i32x16)((x & 0x7f80u) == 0x7f80u) | (i32x16)((x & 0x7f800000u) == 0x7f800000u);
                store(to[i / STEP] + d, x);
            }
        }
        return any(found);
    }

    u32x16 words_at(int slot, int d) const {
        const Element* value = values + (long)slot * D + d;
        return Cache::words(value, value + D);
    }

    // Add the block's first values for as many queries as fit into registers, from q on; returns how many.
    int add_values(int rank, int both, int base, int q, int last) {
        int left = last - q;
        if (AT_ONCE >= 6 && left >= 6) return add_values<6>(rank, both, base, q);
        if (AT_ONCE >= 4 && left >= 4) return add_values<4>(rank, both, base, q);
        if (AT_ONCE >= 3 && left >= 3) return add_values<3>(rank, both, base, q);
        if (left >= 2) return add_values<2>(rank, both, base, q);
        return add_values<1>(rank, both, base, q);
    }

    template <int Q>
    int add_values(int rank, int both, int base, int q) {
        if (gathered) add<Q>(base, q, both / STEP, [&](int word, int d) { return load<u32x16>(words[word] + d); });
        else add<Q>(base, q, both / STEP, [&](int word, int d) { return words_at(rank + word * STEP, d); });
        return Q;
    }

    // Words of values, times their weights: a slice of their dimensions at a time.
    template <int Q, class Values>
    inline void add(int base, int first, int count_words, Values values_of) {
        for (int part = 0; part < PARTS; part += SLICE) add_slice<Q>(base, first, count_words, part, values_of);
    }

    // What is used most often stays in registers.
    template <int Q, class Values>
    inline void add_slice(int base, int first, int count_words, int begin, Values values_of) {
        f32x16 sums[Q][SLICE];
#pragma GCC unroll 6
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
            for (int part = 0; part < SLICE; part++) sums[q][part] = load<f32x16>(out[first + q] + (begin + part) * LANES);
        for (int word = 0; word < count_words; word++) {
            if constexpr (Q >= SLICE) {
                u32x16 x[SLICE];
#pragma GCC unroll 8
                for (int part = 0; part < SLICE; part++) x[part] = values_of(word, (begin + part) * LANES);
#pragma GCC unroll 6
                for (int q = 0; q < Q; q++) {
                    uint32_t w = weight(first - base + q, word);
#pragma GCC unroll 8
                    for (int part = 0; part < SLICE; part++) sums[q][part] = Cache::dot(sums[q][part], x[part], w);
                }
            } else {
                uint32_t w[Q];
#pragma GCC unroll 6
                for (int q = 0; q < Q; q++) w[q] = weight(first - base + q, word);
#pragma GCC unroll 8
                for (int part = 0; part < SLICE; part++) {
                    u32x16 x = values_of(word, (begin + part) * LANES);
#pragma GCC unroll 6
                    for (int q = 0; q < Q; q++) sums[q][part] = Cache::dot(sums[q][part], x, w[q]);
                }
            }
        }
#pragma GCC unroll 6
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
            for (int part = 0; part < SLICE; part++) store(out[first + q] + (begin + part) * LANES, sums[q][part]);
    }

    // The block's other ranks that a query sees.
    void add_rest(int rank, int from, int q, int place) {
        const Sight& sight = sights[q];
        int end = std::min(BLOCK, sight.count() - rank);
        for (int i = from; i < end; i += STEP) {
            const Element* first = values + (long)sight.slot(rank + i) * D;
            const Element* second = rank + i + 1 < sight.count() ? values + (long)sight.slot(rank + i + 1) * D : nullptr;
            uint32_t w = weight(place, i / STEP);
            for (int d = 0; d < D; d += LANES) {
                u32x16 x = Cache::words(first + d, second ? second + d : nullptr);
                store(out[q] + d, Cache::dot(load<f32x16>(out[q] + d), x, w));
            }
        }
    }

    // The same by tiles, chunk by chunk.
    void add_own(int rank, int from, int q, int place) {
        alignas(64) uint32_t own[CHUNK / STEP][D];
        int end = std::min(BLOCK, sights[q].count() - rank);
        for (int i = from; i < end; i += CHUNK) {
            gather_words(sights[q], rank + i, CHUNK, own);
            TileProducts<D>::add_values(weights[place] + i, 0, own, 1, out[q], 0);
        }
    }
};

}  // namespace tokenleap
