// The most probable tokens after a node.

#pragma once

#include <cmath>
#include <limits>

#include "linear.h"

namespace tokenleap {

// The largest logits seen so far, one in each lane, and their tokens.
struct Best {
    f32x16 logits = splat(-std::numeric_limits<float>::infinity());
    i32x16 tokens = splat(std::numeric_limits<int32_t>::max());

    // Tokens come in ascending order: the first of equals stays.
    void add(const float* others, long first, long vocabulary) {
        static constexpr int32_t LANE[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const i32x16 lanes = load<i32x16>(LANE);
        for (long i = 0; i < PANEL; i += LANES) {
            i32x16 ids = lanes + (int32_t)(first + i);
            i32x16 better = (load<f32x16>(others + i) > logits) & (ids < (int32_t)vocabulary);
            logits = select(better, load<f32x16>(others + i), logits);
            tokens = select(better, ids, tokens);
        }
    }

    void add(const Best& other) {
        i32x16 better = (other.logits > logits) | ((other.logits == logits) & (other.tokens < tokens));
        logits = select(better, other.logits, logits);
        tokens = select(better, other.tokens, tokens);
    }

    // -1 if the largest logit is infinite, or all are NaN.
    int64_t token() const {
        int best = 0;
        for (int i = 1; i < LANES; i++)
            if (logits[i] > logits[best] || (logits[i] == logits[best] && tokens[i] < tokens[best])) best = i;
        return std::isfinite(logits[best]) ? tokens[best] : -1;
    }
};

// The most probable tokens after a node, in descending order; of equals the first.
struct Ranking {
    static constexpr int MOST = 80;  // 64 children, and the next one after them

    int count = 0;
    int32_t tokens[MOST];
    float values[MOST];  // logits, in the end probabilities; all are NaN if a logit is NaN or infinity

    // The tokens with the largest values, which `of` gives for sixteen tokens from the i-th on.
    template <class Of>
    void order(long vocabulary, int most, Of of) {
        count = 0;
        for (long i = 0; i < vocabulary; i += LANES) {
            f32x16 x = of(i);
            if (any(x > least(most)))
                for (int lane = 0; lane < LANES; lane++)
                    if (x[lane] > least(most)) insert(i + lane, x[lane], most);
        }
    }

    void rank(const float* logits, long vocabulary, int most) {
        order(vocabulary, most, [&](long i) { return some(logits, i, vocabulary); });
        if (!count) insert(0, logits[0], most);
        float largest = values[0];
        f32x16 total = {};
        for (long i = 0; i < vocabulary; i += LANES) total += exp(some(logits, i, vocabulary) - largest);
        float scale = 1.0f / sum(total);
        for (int i = 0; i < count; i += LANES)
            store(values + i, exp(load<f32x16>(values + i) - largest) * scale);
    }

    // Sixteen logits; -infinity after the last.
    static f32x16 some(const float* logits, long first, long vocabulary) {
        if (first + LANES <= vocabulary) return load<f32x16>(logits + first);
        f32x16 x = splat(NONE);
        std::memcpy(&x, logits + first, (vocabulary - first) * sizeof(float));
        return x;
    }

private:
    static constexpr float NONE = -std::numeric_limits<float>::infinity();

    // Larger logits are among the best so far.
    float least(int most) const { return count < most ? NONE : values[count - 1]; }

    void insert(int32_t token, float logit, int most) {
        int place = count < most ? count++ : count - 1;
        for (; place > 0 && values[place - 1] < logit; place--) {
            values[place] = values[place - 1];
            tokens[place] = tokens[place - 1];
        }
        values[place] = logit;
        tokens[place] = token;
    }
};

}  // namespace tokenleap
