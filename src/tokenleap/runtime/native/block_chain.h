// The best chain of tokens of logits that one pass has computed for all its levels.

#pragma once

#include "ranking.h"

namespace tokenleap {

struct BlockChain {
    const float* logits;           // [levels, vocabulary], `stride` numbers from level to level
    const uint8_t *added, *rows;   // [vocabulary, size] each, or null: levels do not depend on one another
    int32_t* tokens;               // [levels]
    float* probabilities;          // [levels]
    int32_t levels, vocabulary, stride, size, is_bf16;
    int32_t candidates;            // tokens of a level that transitions are added to, the most probable ones
    float most;                    // that they add to a logit

    void choose() const {
        Ranking best;
        for (int level = 0; level < levels; level++) {
            best.rank(logits + (long)level * stride, vocabulary, added ? candidates : 1);
            if (added && level) follow(best, tokens[level - 1]);
            tokens[level] = best.tokens[0];
            probabilities[level] = best.values[0];
        }
    }

private:
    // Puts the best candidate after a token first. Nothing is added to the other tokens of the vocabulary.
    void follow(Ranking& best, int32_t before) const {
        float total = 1.0f, largest = -1.0f;
        int first = 0;
        for (int i = 0; i < best.count; i++) {
            float more = is_bf16 ? dot<bf16>(before, best.tokens[i]) : dot<float>(before, best.tokens[i]);
            total -= best.values[i];
            best.values[i] *= exp(splat(more > most ? most : more))[0];
            if (best.values[i] > largest) largest = best.values[first = i];
        }
        total = total > 0.0f ? total : 0.0f;
        for (int i = 0; i < best.count; i++) total += best.values[i];
        best.tokens[0] = best.tokens[first];
        best.values[0] = best.values[first] / total;
    }

    template <class Number>
    float dot(int32_t before, int32_t token) const {
        const Number* x = (const Number*)added + (long)before * size;
        const Number* y = (const Number*)rows + (long)token * size;
        f32x16 total = {};
        for (long i = 0; i < size; i += LANES) total += numbers(x + i) * numbers(y + i);
        return sum(total);
    }

    static f32x16 numbers(const float* from) { return load<f32x16>(from); }
    static f32x16 numbers(const bf16* from) { return widen(from); }
};

}  // namespace tokenleap
