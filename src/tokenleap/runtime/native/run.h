// One pass of a decoder: the Llama family, and encoder-decoders in the layouts of BART and T5. Their encoders, too:
// there, every node sees all slots.
//
// lean.py and seq2seq/network.py are the readable versions of the computation. Here one parallel region covers all layers, and
// its threads share every part of a layer (team.h). Numbers stay in float32 between linear
// layers.

#pragma once

#include <algorithm>

#include "attention.h"
#include "pass.h"
#include "ranking.h"
#include "team.h"

namespace tokenleap {

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

class Run {
public:
    Run(const Decoder& decoder, const Pass& pass) : d_(decoder), p_(pass) {
        layout(pass.workspace);
    }

    // OpenMP may give fewer threads than were asked for.
    void begin(int threads, int pieces) {
        team_.expect(threads, pieces);
    }

    // Parts of a phase for each thread. Phases of large passes are long, so that a thread may be stopped within one.
    static constexpr int PIECES = 4;
    int pieces() const { return p_.nodes < 32 ? 1 : PIECES; }

    // Lay out the buffers one after the other from `base` on; returns their size in bytes.
    size_t layout(uint8_t* base) {
        size_t used = 0, nodes = p_.nodes;
        auto take = [&](size_t bytes) {
            uint8_t* at = base + used;
            used += aligned(bytes);
            return at;
        };
        // Layers may have different formats.
        size_t normed = row_bytes(d_.head), mixed = 0, inner = 0;
        bool apart = false, after = false;  // whether any layer has gate and up apart, or norms after its parts
        if (d_.mix.weight) normed = std::max(normed, row_bytes(d_.mix));
        for (int i = 0; i < d_.num_layers; i++) {
            const Layer& layer = d_.layers[i];
            after |= layer.attention_after || layer.mlp_after;
            normed = std::max({normed, row_bytes(layer.qkv[0]), row_bytes(layer.gate_up[0])});
            mixed = std::max(mixed, row_bytes(layer.output));
            if (layer.source_query.weight) {
                normed = std::max(normed, row_bytes(layer.source_query));
                mixed = std::max(mixed, row_bytes(layer.source_output));
            }
            inner = std::max(inner, row_bytes(layer.down));
            apart |= layer.gate_up[1].weight != nullptr;
        }
        stream_ = (float*)take(nodes * d_.hidden_size * sizeof(float));
        qkv_ = (float*)take(nodes * heads() * d_.width * sizeof(float));
        normed_ = take(nodes * normed);
        mixed_ = take(nodes * mixed);
        inner_ = take(nodes * inner);
        gates_ = (float*)take(apart ? nodes * d_.intermediate * sizeof(float) : 0);
        added_ = (float*)take(after ? nodes * d_.hidden_size * sizeof(float) : 0);
        best_ = (Best*)take((size_t)p_.threads * PIECES * nodes * sizeof(Best));
        return used;
    }

    void thread(int id) {
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) {
                if (joint()) join(node);
                else if (d_.mix.weight) pair(node);
                else begin_stream(node);
            });
        });
        if (d_.mix.weight) mix(id);
        for (int i = 0; i < d_.num_layers; i++) {
            const Layer& layer = d_.layers[i];
            keep_hidden(i, id);
            if (layer.attends) find_heads(layer, id);
            if (i + 1 == d_.num_layers && !has_readers()) return;  // its keys and values are written
            if (layer.attends) attention(layer, id);
            normalise_sums(layer.attention_norm, id);
            if (layer.source_query.weight) {
                if (layer.attends) read_source(layer, id);
                normalise_sums(layer.source_norm, id);
            }
            if (layer.computes) mlp(layer, id);
            normalise_sums(layer.mlp_norm, id);
        }
        keep_hidden(d_.num_layers, id);
        if (p_.scored) score(id);
    }

    // Go on when all threads are here.
    void meet(int id) { team_.meet(id); }

    int threads() const { return team_.threads(); }

    // A part of `count` things.
    template <class Work>
    void share(long count, int part, Work work) const {
        for (long i = count * part / team_.parts(); i < count * (part + 1) / team_.parts(); i++) work((int)i);
    }

    // The argmax of each node, when all threads are done: each part has seen some of the vocabulary.
    void choose() {
        for (int i = 0; i < p_.scored; i++) {
            Best best{};
            for (int part = 0; part < team_.parts(); part++) best.add(best_[(long)part * p_.scored + i]);
            p_.argmax[i] = best.token();
        }
    }

private:
    int heads() const { return d_.heads + 2 * d_.key_heads; }

    // Whether anything reads the residual stream after the last layer.
    bool has_readers() const { return p_.scored || (p_.hidden && p_.hidden_slots[d_.num_layers] >= 0); }

    // A part of a linear layer's outputs, times all rows.
    template <int UNIT, class Finish>
    void product(const Linear& layer, const uint8_t* inputs, int rows, int id, Finish finish) {
        team_.each(id, [&](int part) { multiply<UNIT>(layer, inputs, rows, part, team_.parts(), finish); });
    }

    void score(int id) {
        team_.each(id, [&](int part) {
            share(p_.scored, part, [&](int i) { normalise(p_.scored_nodes[i], d_.norm, d_.head, i); });
        });
        long vocabulary = d_.head.outputs;
        team_.each(id, [&](int part) {
            Best* best = best_ + (long)part * p_.scored;
            for (int i = 0; i < p_.scored; i++) best[i] = Best{};
            multiply<1>(d_.head, normed_, p_.scored, part, team_.parts(), [&](long i, long panel, float* sums) {
                if (changes_logits()) finish_logits(sums);
                long first = panel * PANEL, count = vocabulary - first < PANEL ? vocabulary - first : PANEL;
                std::memcpy(p_.logits + i * vocabulary + first, sums, count * sizeof(float));
                best[i].add(sums, first, vocabulary);
            });
        });
    }

    bool changes_logits() const { return d_.logit_scale != 1 || d_.logit_cap != 0; }

    void finish_logits(float* logits) const {
        for (int i = 0; i < PANEL; i += LANES) store(logits + i, load<f32x16>(logits + i) * d_.logit_scale);
        if (d_.logit_cap == 0) return;
        for (int i = 0; i < PANEL; i += LANES) store(logits + i, capped(load<f32x16>(logits + i), d_.logit_cap));
    }

    void embed(int node, float* to) {
        long token = p_.tokens[node];
        bool known = token < d_.vocabulary;
        widen_row(known ? d_.embedding : d_.more, known ? token : token - d_.vocabulary, d_.hidden_size, d_.is_bf16, to);
        if (!known || d_.embedding_scale == 1) return;
        for (int i = 0; i < d_.hidden_size; i += LANES) store(to + i, load<f32x16>(to + i) * d_.embedding_scale);
    }

    // What the residual stream of a language model begins with.
    void begin_stream(int node) {
        float* stream = stream_ + (long)node * d_.hidden_size;
        embed(node, stream);
        if (d_.position_embedding && p_.tokens[node] != d_.unplaced_token) {
            long position = std::min<long>(p_.positions[node], d_.embedded_positions - 1);
            const float* added = d_.position_embedding + position * d_.hidden_size;
            for (int i = 0; i < d_.hidden_size; i += LANES)
                store(stream + i, load<f32x16>(stream + i) + load<f32x16>(added + i));
        }
        if (d_.embedding_norm.weight) normalise_row(stream, d_.embedding_norm, d_.epsilon, d_.hidden_size, stream);
    }

    bool joint() const { return d_.state_norm != nullptr; }

    // A drafting head: the stream begins with the state, and the first layer reads both.
    void join(int node) {
        float x[MOST_HIDDEN_SIZE];
        int size = d_.hidden_size;
        const Linear& qkv = d_.layers[0].qkv[0];
        uint8_t* inputs = normed_ + node * row_bytes(qkv);
        float* stream = stream_ + (long)node * size;
        embed(node, x);
        normalise_row(x, d_.embedding_norm, d_.epsilon, size, x);
        encode(qkv, x, inputs, 0, size);
        widen_row(p_.states, node, size, d_.is_bf16, stream);
        rms_norm(stream, d_.state_norm, d_.epsilon, size, x);
        encode(qkv, x, inputs, size, size);
        if (d_.norm_before_residual) std::memcpy(stream, x, size * sizeof(float));
    }

    // A head whose stream begins with `mix`: its inputs.
    void pair(int node) {
        float x[MOST_HIDDEN_SIZE];
        int size = d_.hidden_size;
        uint8_t* inputs = normed_ + node * row_bytes(d_.mix);
        embed(node, x);
        encode(d_.mix, x, inputs, 0, size);
        widen_row(p_.states, node, size, d_.is_bf16, x);
        encode(d_.mix, x, inputs, size, size);
    }

    void mix(int id) {
        product<1>(d_.mix, normed_, p_.nodes, id, [&](long node, long panel, const float* sums) {
            std::memcpy(stream_ + node * d_.hidden_size + panel * PANEL, sums, PANEL * sizeof(float));
        });
    }

    // Copy the residual stream entering a layer, if the caller asked for it.
    void keep_hidden(int layer, int id) {
        if (!p_.hidden || p_.hidden_slots[layer] < 0) return;
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) { keep_hidden_of(layer, node); });
        });
    }

    void keep_hidden_of(int layer, int node) {
        float normal[MOST_HIDDEN_SIZE];
        const float* from = stream_ + (long)node * d_.hidden_size;
        if (d_.norm_output && d_.norm.weight && layer == d_.num_layers) {
            normalise_row(from, d_.norm, d_.epsilon, d_.hidden_size, normal);
            from = normal;
        }
        long place = ((long)p_.hidden_slots[layer] * p_.nodes + node) * d_.hidden_size;
        narrow_to(from, d_.hidden_size, d_.is_bf16, p_.hidden, place);
    }

    // Normalise the residual stream of a node, as row `row` of the inputs of a linear layer.
    void normalise(int node, const Norm& norm, const Linear& reader, int row) {
        float normal[MOST_HIDDEN_SIZE];
        const float* from = stream_ + (long)node * d_.hidden_size;
        if (norm.weight) {
            normalise_row(from, norm, d_.epsilon, d_.hidden_size, normal);
            from = normal;
        }
        encode(reader, from, normed_ + row * row_bytes(reader), 0, d_.hidden_size);
    }

    // The inputs of a part of a layer.
    void prepare_inputs(const Norm& norm, const Linear& reader, int id) {
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) { normalise(node, d_.norms_sums ? Norm{} : norm, reader, node); });
        });
    }

    // What stands after a part of a layer: its norm, if that is of the sum.
    void normalise_sums(const Norm& norm, int id) {
        if (!d_.norms_sums) return;
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) {
                float* stream = stream_ + (long)node * d_.hidden_size;
                normalise_row(stream, norm, d_.epsilon, d_.hidden_size, stream);
            });
        });
    }

    // Add a product to the residual stream; `norm` is that of whole rows of it, or null.
    void add_product(const Linear& layer, const uint8_t* inputs, const float* norm, int id) {
        product<1>(layer, inputs, p_.nodes, id, [&](long node, long panel, const float* sums) {
            long place = node * d_.hidden_size + panel * PANEL;
            if (norm) std::memcpy(added_ + place, sums, PANEL * sizeof(float));
            else add(sums, PANEL, stream_ + place);
        });
        if (!norm) return;
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) {
                float* row = added_ + (long)node * d_.hidden_size;
                rms_norm(row, norm, d_.epsilon, d_.hidden_size, row);
                add(row, d_.hidden_size, stream_ + (long)node * d_.hidden_size);
            });
        });
    }

    void add(const float* from, int size, float* to) const {
        for (int i = 0; i < size; i += LANES)
            store(to + i, load<f32x16>(to + i) + load<f32x16>(from + i) * d_.residual_scale);
    }

    void mlp(const Layer& layer, int id) {
        prepare_inputs(layer.mlp_norm, layer.gate_up[0], id);
        if (d_.ungated) {
            product<1>(layer.gate_up[0], normed_, p_.nodes, id, [&](long node, long panel, const float* sums) {
                activate(layer, node, panel, sums, nullptr);
            });
        } else if (layer.gate_up[1].weight) {
            gate_and_up(layer, id);
        } else {
            product<2>(layer.gate_up[0], normed_, p_.nodes, id, [&](long node, long panel, float* sums) {
                activate(layer, node, panel, sums, sums + PANEL);
            });
        }
        add_product(layer.down, inner_, layer.mlp_after, id);
    }

    // Gate and up with a format each. A part has the same outputs of both, so its gates are there before its ups.
    void gate_and_up(const Layer& layer, int id) {
        team_.each(id, [&](int part) {
            auto gate_at = [&](long node, long panel) { return gates_ + node * d_.intermediate + panel * PANEL; };
            multiply<1>(layer.gate_up[0], normed_, p_.nodes, part, team_.parts(), [&](long node, long panel, const float* sums) {
                std::memcpy(gate_at(node, panel), sums, PANEL * sizeof(float));
            });
            multiply<1>(layer.gate_up[1], normed_, p_.nodes, part, team_.parts(), [&](long node, long panel, const float* sums) {
                activate(layer, node, panel, gate_at(node, panel), sums);
            });
        });
    }

    // SiLU, x / (1 + e^-x); GELU with tanh, which is x / (1 + e^-y); GELU; or ReLU, which keeps NaN.
    template <Activation KIND>
    static f32x16 activated(f32x16 x) {
        if constexpr (KIND == Activation::RELU) return max(f32x16{}, x);
        if constexpr (KIND == Activation::GELU) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        if constexpr (KIND == Activation::GELU_TANH) return x / (1.0f + exp(-x * (1.5957691216f + 0.0713548163f * x * x)));
        return x / (1.0f + exp(-x));
    }

    // GCC 12 goes wrong if the kind is a condition on vectors in a loop.
    template <Activation KIND>
    static void activate(const float* gates, const float* ups, float* to) {
        for (int i = 0; i < PANEL; i += LANES) {
            f32x16 x = activated<KIND>(load<f32x16>(gates + i));
            store(to + i, ups ? x * load<f32x16>(ups + i) : x);
        }
    }

    // Some inputs of the layer's `down`; `ups` is null without gates.
    void activate(const Layer& layer, long node, long panel, const float* gates, const float* ups) {
        float x[PANEL];
        switch (d_.activation) {
            case Activation::SILU: activate<Activation::SILU>(gates, ups, x); break;
            case Activation::GELU_TANH: activate<Activation::GELU_TANH>(gates, ups, x); break;
            case Activation::GELU: activate<Activation::GELU>(gates, ups, x); break;
            case Activation::RELU: activate<Activation::RELU>(gates, ups, x); break;
        }
        encode(layer.down, x, inner_ + node * row_bytes(layer.down), panel * PANEL, PANEL);
    }

    // Queries, keys and values; the last two go into the slab.
    void find_heads(const Layer& layer, int id) {
        if (!joint() || &layer != d_.layers) prepare_inputs(layer.attention_norm, layer.qkv[0], id);
        long size = heads() * d_.width;
        team_.each(id, [&](int part) {
            float* to = qkv_;
            for (const Linear& some : layer.qkv) {
                if (!some.weight) break;
                multiply<1>(some, normed_, p_.nodes, part, team_.parts(), [&](long node, long panel, const float* sums) {
                    std::memcpy(to + node * size + panel * PANEL, sums, PANEL * sizeof(float));
                });
                to += some.outputs;
            }
        });
        if (d_.whole_norms) normalise_heads(layer, id);
        team_.each(id, [&](int part) {
            share((long)p_.nodes * heads(), part, [&](int i) { finish_head(layer, i / heads(), i % heads()); });
        });
    }

    void attention(const Layer& layer, int id) {
        team_.each(id, [&](int part) { attend(layer, layer.output, part); });
        add_product(layer.output, mixed_, layer.attention_after, id);
    }

    // Cross-attention; queries lie where those of self-attention did.
    void read_source(const Layer& layer, int id) {
        prepare_inputs(layer.source_norm, layer.source_query, id);
        long size = heads() * d_.width;
        product<1>(layer.source_query, normed_, p_.nodes, id, [&](long node, long panel, const float* sums) {
            std::memcpy(qkv_ + node * size + panel * PANEL, sums, PANEL * sizeof(float));
        });
        team_.each(id, [&](int part) { attend(layer, layer.source_output, part); });
        add_product(layer.source_output, mixed_, nullptr, id);
    }

    // All queries of a node as one vector, and all keys.
    void normalise_heads(const Layer& layer, int id) {
        team_.each(id, [&](int part) {
            share(p_.nodes, part, [&](int node) {
                float* queries = qkv_ + (long)node * heads() * d_.width;
                float* keys = queries + d_.heads * d_.width;
                rms_norm(queries, layer.query_norm, d_.epsilon, d_.heads * d_.width, queries);
                rms_norm(keys, layer.key_norm, d_.epsilon, d_.key_heads * d_.width, keys);
            });
        });
    }

    // Normalise and rotate a query or key; write keys and values into the slab.
    void finish_head(const Layer& layer, int node, int head) {
        float* x = qkv_ + ((long)node * heads() + head) * d_.width;
        int first_value = d_.heads + d_.key_heads;
        if (head < first_value) {
            const float* norm = head < d_.heads ? layer.query_norm : layer.key_norm;
            if (norm && !d_.whole_norms) rms_norm(x, norm, d_.epsilon, d_.width, x);
            if (layer.angles >= 0) rotate(x, layer.angles * p_.angles + p_.positions[node]);
        }
        if (head < d_.heads) return;
        bool is_key = head < first_value;
        long group = head - (is_key ? d_.heads : first_value);
        const Buffers& kv = p_.buffers[layer.index];
        uint8_t* buffer = is_key ? kv.keys : kv.values;
        long slots = is_key ? kv.key_slots : kv.value_slots;
        long place = ((p_.rows[node] * d_.key_heads + group) * slots + p_.slots[node]) * d_.width;
        narrow_to(x, d_.width, d_.is_bf16, buffer, place);
    }

    void rotate(float* x, long place) {
        int half_width = d_.width / 2;
        const float *cos = p_.cos + place * half_width, *sin = p_.sin + place * half_width;
        for (int i = 0; i < half_width; i += LANES) {
            f32x16 first = load<f32x16>(x + i), second = load<f32x16>(x + half_width + i);
            f32x16 c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
            store(x + i, fma(first, c, -(second * s)));
            store(x + half_width + i, fma(second, c, first * s));
        }
    }

    // Self-attention, or attention to sources: `reader` is the layer that reads the result.
    void attend(const Layer& layer, const Linear& reader, int part) {
        if (!d_.is_bf16) return attend<FloatCache>(layer, reader, part);
        if constexpr (HAVE_TILES) {
            if (TileShapes::granted()) {
                TileShapes shapes(TileShapes::HEIGHT);
                return attend<Bf16Cache, true>(layer, reader, part);
            }
        }
        attend<Bf16Cache>(layer, reader, part);
    }

    template <class Cache, bool TILED = false>
    void attend(const Layer& layer, const Linear& reader, int part) {
        switch (d_.width) {
            case 32: return attend<Cache, 32, TILED>(layer, reader, part);
            case 64: return attend<Cache, 64, TILED>(layer, reader, part);
            case 96: return attend<Cache, 96, TILED>(layer, reader, part);
            case 128: return attend<Cache, 128, TILED>(layer, reader, part);
            default: return attend<Cache, 256, TILED>(layer, reader, part);
        }
    }

    // A task is some adjacent nodes of a row and one key head. Parts take tasks in turn.
    template <class Cache, int D, bool TILED>
    void attend(const Layer& layer, const Linear& reader, int part) {
        int group = d_.heads / d_.key_heads, most = QUERIES / group > 0 ? QUERIES / group : 1;
        int parts = team_.parts(), wanted = (p_.nodes * d_.key_heads + 4 * parts - 1) / (4 * parts);  // four tasks a part
        int nodes = wanted < most ? wanted : most, task = 0;
        for (int first = 0, last; first < p_.nodes; first = last) {
            for (last = first + 1; last < p_.nodes && last < first + nodes && p_.rows[last] == p_.rows[first];) last++;
            for (int key_head = 0; key_head < d_.key_heads; key_head++)
                if (task++ % parts == part)
                    for (int head = 0; head < group; head += QUERIES)  // one round, except for huge groups
                        attend<Cache, D, TILED>(layer, reader, first, last, key_head, key_head * group + head,
                                                group - head < QUERIES ? group - head : QUERIES);
        }
    }

    template <class Cache, int D, bool TILED>
    void attend(const Layer& layer, const Linear& reader, int first, int last, int key_head, int head, int heads_here) {
        using Element = typename Cache::Element;
        Attention<Cache, D, TILED> attention;
        const Source* source = &reader == &layer.source_output ? p_.sources + p_.rows[first] : nullptr;
        if (source) {
            long place = ((long)layer.index * d_.key_heads + key_head) * source->span * D;
            attention.keys = (const Element*)source->keys + place;
            attention.values = (const Element*)source->values + place;
        } else {
            const Buffers& kv = p_.buffers[layer.index];
            long place = (long)p_.rows[first] * d_.key_heads + key_head;
            attention.keys = (const Element*)kv.keys + place * kv.key_slots * D;
            attention.values = (const Element*)kv.values + place * kv.value_slots * D;
        }
        attention.scaling = d_.scaling;
        attention.cap = d_.score_cap;
        attention.before = d_.distances_before;
        attention.behind = d_.distances_behind;
        Sight sights[QUERIES];
        const float* queries[QUERIES];
        int count = 0;
        for (int node = first; node < last; node++) {
            Sight sight = source ? Sight{nullptr, 0, (int32_t)source->positions, 0} : sight_of(layer, node);
            for (int i = 0; i < heads_here; i++, count++) {
                if (d_.distance_bias && !source) sight.bias = bias_of(layer, head + i);
                sights[count] = sight;
                queries[count] = qkv_ + ((long)node * heads() + head + i) * D;
            }
        }
        attention.sights = sights;
        attention.count = count;
        attention.run(queries);
        size_t stride = row_bytes(reader);
        for (int q = 0; q < count; q++) {
            long node = first + q / heads_here;
            encode(reader, attention.out[q], mixed_ + node * stride, (head + q % heads_here) * D, D);
        }
    }

    // What a node sees of its row.
    Sight sight_of(const Layer& layer, int node) const {
        int32_t tails = p_.tail_starts[node], first_seen = layer.window ? p_.positions[node] + 1 - layer.window : 0;
        return {p_.tails + tails, p_.tail_starts[node + 1] - tails, p_.prefixes[node], first_seen < 0 ? 0 : first_seen,
                p_.positions[node]};
    }

    // The bias of a head for a distance of 0.
    const float* bias_of(const Layer& layer, long head) const {
        return d_.distance_bias + layer.index * d_.distance_bias_stride +
               head * (d_.distances_behind + 1 + d_.distances_before) + d_.distances_behind;
    }

    const Decoder& d_;
    const Pass& p_;
    Team team_;
    float *stream_, *qkv_;                // [T, E], [T, H + 2 G, D]
    float *gates_, *added_;               // [T, I], [T, E]
    Best* best_;                          // [parts, T]
    uint8_t *normed_, *mixed_, *inner_;   // inputs of linear layers: [T, E], [T, H D], [T, I]
};

}  // namespace tokenleap
