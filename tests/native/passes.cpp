// Passes of small decoders with made-up weights, in the formats that have groups of 32 at most; of Llama's relatives and
// of encoder-decoders, too. Prints sums over the bits of what they return, so that builds for different processors can be
// compared. Ends with status 1 if bits depend on the pass: tokens in
// one pass, in chunks, one by one, and as a path of a tree must have the same logits, with any number of threads.

#include <cstdio>
#include <vector>

#include "decoder.cpp"

using namespace tokenleap;

namespace {

struct Random {
    uint32_t state;

    float next() {  // -1 to 1, exact in every format of floats
        state = state * 1664525u + 1013904223u;
        return ((int)(state >> 24) - 128) / 128.0f;
    }
};

using Bytes = std::vector<uint8_t>;

half as_half(float x) {  // of positive powers of two
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (half)((((bits >> 23) - 112) << 10));
}

struct Layers {
    std::vector<Bytes> kept;

    Linear linear(Format format, int inputs, int outputs, Random& random) {
        int panels = (outputs + PANEL - 1) / PANEL;
        Bytes weight(panel_bytes(format, inputs) * panels + 64);
        if (format == Format::F32 || format == Format::BF16) {
            bool narrow = format == Format::BF16;
            for (size_t i = 0; i < (size_t)panels * PANEL * inputs; i++) {
                float x = random.next() / 8;
                uint32_t bits;
                std::memcpy(&bits, &x, sizeof bits);
                uint16_t high = (uint16_t)(bits >> 16);
                std::memcpy(weight.data() + i * (narrow ? 2 : 4), narrow ? (void*)&high : (void*)&x, narrow ? 2 : 4);
            }
        } else {
            size_t group = group_bytes(format), scales = (format == Format::INT8 ? 1 : 2) * 2 * PANEL;
            for (size_t at = 0; at + group <= weight.size(); at += group) {
                for (size_t i = 0; i < group - scales; i++) weight[at + i] = (uint8_t)(int)(random.next() * 127);
                for (size_t i = 0; i < scales; i += 2) {
                    half scale = as_half(format == Format::INT8 ? 0x1p-10f : 0x1p-7f);
                    if (i >= 2 * PANEL) scale = (half)(as_half(0x1p-4f) | 0x8000);  // least numbers of int4
                    std::memcpy(weight.data() + at + group - scales + i, &scale, 2);
                }
            }
        }
        kept.push_back(weight);
        return Linear{kept.back().data(), nullptr, format, inputs, outputs, format};
    }

    const float* norm(int size, Random& random) {
        Bytes weights(size * sizeof(float));
        for (int i = 0; i < size; i++) ((float*)weights.data())[i] = 1 + random.next() / 4;
        kept.push_back(weights);
        return (const float*)kept.back().data();
    }
};

enum class Kind { LLAMA, RELATIVE, BART, T5 };  // a relative has all that Llama has not

struct Shape {
    int heads, key_heads, width, window;
    Kind kind = Kind::LLAMA;

    bool reads_source() const { return kind == Kind::BART || kind == Kind::T5; }
};

constexpr int SIZE = 96, INNER = 160, VOCABULARY = 77, LAYERS = 2, TOKENS = 45, SLOTS = 300, SOURCE = 37, DISTANCES = 9;

struct Model {
    Layers layers;
    Layer each[LAYERS];
    Decoder decoder{};
    Bytes embedding, keys[LAYERS], values[LAYERS], workspace;
    Buffers buffers[LAYERS];
    std::vector<float> cos, sin;
    Source source{};
    Shape shape;

    Model(Format format, bool is_bf16, Shape of) : shape(of) {
        layers.kept.reserve(64);
        Random random{7};
        size_t element = is_bf16 ? 2 : 4;
        for (int i = 0; i < LAYERS; i++) {
            Layer layer{};
            layer.qkv[0] = layers.linear(format, SIZE, (of.heads + 2 * of.key_heads) * of.width, random);
            layer.output = layers.linear(format, of.heads * of.width, SIZE, random);
            layer.gate_up[0] = layers.linear(format, SIZE, 2 * INNER, random);
            layer.down = layers.linear(format, INNER, SIZE, random);
            bool centred = of.kind == Kind::BART;
            layer.attention_norm = Norm{layers.norm(SIZE, random), centred ? layers.norm(SIZE, random) : nullptr};
            layer.mlp_norm = Norm{layers.norm(SIZE, random), centred ? layers.norm(SIZE, random) : nullptr};
            layer.query_norm = i ? layers.norm(of.width, random) : nullptr;
            layer.key_norm = i ? layers.norm(of.width, random) : nullptr;
            if (of.reads_source()) {
                layer.query_norm = layer.key_norm = nullptr;
                layer.angles = -1;
                layer.source_query = layers.linear(format, SIZE, of.heads * of.width, random);
                layer.source_output = layers.linear(format, of.heads * of.width, SIZE, random);
                layer.source_norm = layer.attention_norm;
                if (centred) layer.gate_up[0] = layers.linear(format, SIZE, INNER, random);
            }
            if (of.kind == Kind::RELATIVE) {
                layer.query_norm = layers.norm(of.heads * of.width, random);
                layer.key_norm = layers.norm(of.key_heads * of.width, random);
                layer.attention_after = layers.norm(SIZE, random);
                layer.mlp_after = layers.norm(SIZE, random);
                layer.angles = i - 1;
                layer.gate_up[0] = layers.linear(format, SIZE, INNER, random);
                layer.gate_up[1] = layers.linear(format, SIZE, INNER, random);
            }
            layer.index = i;
            layer.attends = layer.computes = 1;
            layer.window = i ? of.window : 0;
            each[i] = layer;
            keys[i].resize(SLOTS * of.key_heads * of.width * element + 64);
            values[i] = keys[i];
            buffers[i] = Buffers{keys[i].data(), values[i].data(), SLOTS, SLOTS};
        }
        Bytes table(VOCABULARY * SIZE * element);
        for (int i = 0; i < VOCABULARY * SIZE; i++) {
            float x = random.next();
            std::memcpy(table.data() + i * element, (uint8_t*)&x + 4 - element, element);
        }
        embedding = table;
        for (int i = 0; i < SLOTS * of.width / 2; i++) {
            cos.push_back(random.next());
            sin.push_back(random.next());
        }
        decoder.layers = each;
        decoder.head = layers.linear(format == Format::INT4 ? Format::INT8 : format, SIZE, VOCABULARY, random);
        if (of.kind != Kind::BART) decoder.norm.weight = layers.norm(SIZE, random);
        decoder.embedding = embedding.data();
        decoder.vocabulary = VOCABULARY;
        decoder.num_layers = LAYERS;
        decoder.hidden_size = SIZE;
        decoder.heads = of.heads;
        decoder.key_heads = of.key_heads;
        decoder.width = of.width;
        decoder.intermediate = INNER;
        decoder.is_bf16 = is_bf16;
        decoder.epsilon = 1e-5f;
        decoder.scaling = 0.125f;
        decoder.embedding_scale = decoder.residual_scale = decoder.logit_scale = 1;
        decoder.unplaced_token = -1;
        if (of.reads_source()) make_source(random, is_bf16);
        if (of.kind == Kind::BART) {
            decoder.activation = Activation::GELU;
            decoder.ungated = decoder.norms_sums = 1;
            decoder.embedding_norm = each[0].mlp_norm;
            decoder.position_embedding = numbers(TOKENS * SIZE, random);
            decoder.embedded_positions = TOKENS;
            decoder.unplaced_token = 5;
        }
        if (of.kind == Kind::T5) {
            decoder.activation = Activation::RELU;
            decoder.distance_bias = numbers(of.heads * DISTANCES, random);
            decoder.distances_before = DISTANCES - 1;
        }
        if (of.kind == Kind::RELATIVE) {
            decoder.embedding_scale = 3;
            decoder.residual_scale = decoder.logit_scale = 0.5f;
            decoder.logit_cap = 2;
            decoder.score_cap = 1.5f;
            decoder.activation = Activation::GELU_TANH;
            decoder.whole_norms = 1;
        }
    }

    // Floats that stay in memory.
    const float* numbers(int count, Random& random) {
        Bytes made(count * sizeof(float));
        for (int i = 0; i < count; i++) ((float*)made.data())[i] = random.next();
        layers.kept.push_back(made);
        return (const float*)layers.kept.back().data();
    }

    void make_source(Random& random, bool is_bf16) {
        size_t element = is_bf16 ? 2 : 4;
        for (const uint8_t** part : {&source.keys, &source.values}) {
            Bytes made(LAYERS * shape.heads * SOURCE * shape.width * element);
            for (size_t i = 0; i < made.size() / element; i++) {
                float x = random.next();
                std::memcpy(made.data() + i * element, (uint8_t*)&x + 4 - element, element);
            }
            layers.kept.push_back(made);
            *part = layers.kept.back().data();
        }
        source.span = source.positions = SOURCE;
    }

    // Logits of tokens `first` to `last` - 1, after those before them. In a tree, every token has a sibling in
    // the slot before its own that no other token sees, and nothing is read from a prefix after `first`.
    void run(int first, int last, int threads, bool tree, float* logits) {
        std::vector<int64_t> tokens, argmax(2 * TOKENS);
        std::vector<int32_t> positions, rows, slots, prefixes, starts{0}, tails, scored;
        for (int at = first; at < last; at++) {
            for (int twin = tree ? 1 : 0; twin >= 0; twin--) {
                int slot = tree ? first + 2 * (at - first) + 1 - twin : at;
                scored.push_back((int32_t)tokens.size());
                tokens.push_back((at * 31 + 5 + twin) % VOCABULARY);
                positions.push_back(at);
                rows.push_back(0);
                slots.push_back(slot);
                prefixes.push_back(tree ? first : at + 1);
                for (int before = first; tree && before < at; before++) tails.push_back(first + 2 * (before - first) + 1);
                if (tree) tails.push_back(slot);
                starts.push_back((int32_t)tails.size());
            }
        }
        std::vector<float> found(tokens.size() * VOCABULARY);
        Pass pass{};
        pass.nodes = pass.scored = (int32_t)tokens.size();
        pass.threads = threads;
        pass.most_seen = SLOTS;
        pass.tokens = tokens.data();
        pass.positions = positions.data();
        pass.rows = rows.data();
        pass.slots = slots.data();
        pass.prefixes = prefixes.data();
        pass.tail_starts = starts.data();
        pass.tails = tails.data();
        pass.scored_nodes = scored.data();
        pass.buffers = buffers;
        pass.sources = &source;
        pass.cos = cos.data();
        pass.sin = sin.data();
        pass.angles = SLOTS;
        pass.logits = found.data();
        pass.argmax = argmax.data();
        workspace.resize(tokenleap_workspace(&decoder, &pass) + 64);
        pass.workspace = workspace.data() + (64 - (uintptr_t)workspace.data() % 64);
        tokenleap_forward(&decoder, &pass);
        for (int i = 0; i < last - first; i++) {
            const float* from = found.data() + (long)(tree ? 2 * i + 1 : i) * VOCABULARY;
            std::memcpy(logits + (long)(first + i) * VOCABULARY, from, VOCABULARY * sizeof(float));
        }
    }

    std::vector<float> all(int chunk, int threads, bool tree) {
        std::vector<float> logits(TOKENS * VOCABULARY);
        if (tree) run(0, chunk, threads, false, logits.data());
        for (int first = tree ? chunk : 0, last; first < TOKENS; first = last) {
            last = tree || first + chunk > TOKENS ? TOKENS : first + chunk;
            run(first, last, threads, tree, logits.data());
        }
        return logits;
    }
};

int check(const char* name, Format format, bool is_bf16, Shape shape) {
    Model model(format, is_bf16, shape);
    std::vector<float> expected = model.all(TOKENS, 1, false);
    uint64_t sum = 14695981039346656037u;
    int wrong = 0;
    for (float x : expected) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        sum = (sum ^ bits) * 1099511628211u;
        wrong |= !(x == x) || x - x != 0;
    }
    for (int chunk : {1, 7, 33}) wrong |= model.all(chunk, chunk == 7 ? 3 : 2, false) != expected;
    for (int chunk : {2, 19, 40}) wrong |= model.all(chunk, chunk == 19 ? 3 : 1, true) != expected;
    std::printf("%s %s width %d heads %d/%d window %d: %016llx%s\n", name, is_bf16 ? "bfloat16" : "float32", shape.width,
                shape.heads, shape.key_heads, shape.window, (unsigned long long)sum, wrong ? " DIFFERS" : "");
    return wrong;
}

}  // namespace

int main() {
    const char* names[] = {"F32", "BF16", "INT8", "INT4", "INT5"};
    int wrong = 0;
    for (int format = 0; format < 5; format++)
        for (Shape shape : {Shape{3, 1, 32, 0}, Shape{2, 2, 64, 5}, Shape{1, 1, 96, 0}, Shape{7, 1, 128, 20}, Shape{2, 1, 256, 7, Kind::RELATIVE},
                            Shape{3, 3, 32, 0, Kind::BART}, Shape{2, 2, 64, 0, Kind::T5}})
            for (bool is_bf16 : {false, true}) wrong |= check(names[format], (Format)format, is_bf16, shape);
    return wrong;
}
