// Draws with the noise of core/noise.py: the tokens with the largest log p + noise.
//
// noise.py and sampler.py are the readable version, whose draws these are: not to the last bit of a
// score, but where that might decide between two tokens, nothing is drawn here.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "pass.h"
#include "ranking.h"

namespace tokenleap {

// Four random numbers of Philox 4x64-10, as in NumPy.
inline void philox(uint64_t block, const Draw& draw, uint64_t position, uint64_t* numbers) {
    uint64_t a = block, b = draw.trial, c = position, d = draw.stream, key = draw.key[0], other = draw.key[1];
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * a;
        unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * c;
        a = (uint64_t)(second >> 64) ^ b ^ key, b = (uint64_t)second;
        c = (uint64_t)(first >> 64) ^ d ^ other, d = (uint64_t)first;
        key += 0x9E3779B97F4A7C15u, other += 0xBB67AE8584CAA73Bu;
    }
    numbers[0] = a, numbers[1] = b, numbers[2] = c, numbers[3] = d;
}

// A number between 0 and 1 of 52 random bits; 1 less it is exact.
inline double uniform(uint64_t bits) { return ((double)(int64_t)(bits >> 12) + 0.5) * 0x1p-52; }

// Finds the token with the largest log p + noise.
//
// It has the least -log u / p, and 1 - u is less than -log u: so hardly any token needs its logarithm.
class Race {
public:
    // Let the tokens from `first` on, up to `last`, take part; `first` is a multiple of 4.
    void run(const Draw& draw, const float* probabilities, const int64_t* ids, long first, long last) {
        constexpr int MANY = 32;
        uint64_t numbers[MANY], block = 0;
        long i = first;
        for (; !ids && i + MANY <= last; i += MANY) {
            for (int lane = 0; lane < MANY; lane += 4)  // NumPy counts before it draws
                philox((i + lane) / 4 + 1, draw, draw.position, numbers + lane);
            bool near = false;  // one branch for all of them, which is hardly ever taken
            double next = next_;
            for (int lane = 0; lane < MANY; lane++) near |= !is_far(probabilities[i + lane], numbers[lane], next);
            for (int lane = 0; near && lane < MANY; lane++) look(i + lane, probabilities[i + lane], numbers[lane]);
        }
        for (; i < last; i++) {
            uint64_t id = ids ? ids[i] : i;
            if (block != id / 4 + 1) philox(block = id / 4 + 1, draw, draw.position, numbers);
            look(i, probabilities[i], numbers[id % 4]);
        }
    }

    void join(const Race& other) {
        enter(other.found_, other.least_);
        next_ = std::min(next_, other.next_);
    }

    // The token's index, or -1 if that is not certain: noise.py has log p in float32.
    long winner() const { return next_ > least_ * (1 + 1e-5) ? found_ : -1; }

private:
    static bool is_far(double p, uint64_t bits, double next) { return 1 - uniform(bits) > next * p; }

    void look(long i, double p, uint64_t bits) {
        if (!is_far(p, bits, next_)) enter(i, -std::log(uniform(bits)) / p);
    }

    void enter(long i, double time) {
        if (time < least_) next_ = least_, least_ = time, found_ = i;
        else if (time < next_) next_ = time;
    }

    double least_ = std::numeric_limits<double>::infinity(), next_ = least_;
    long found_ = -1;
};

// The random bits of sixteen tokens, as in `Noise._uniform`. Of each block of four numbers there is one
// copy. No branch depends on the tokens, because it would be mispredicted.
inline void random_bits(const Draw& draw, uint64_t position, const int64_t* ids, long first, long vocabulary,
                        uint64_t* bits) {
    uint64_t blocks[LANES], numbers[4 * LANES], last = 0;
    int count = 0, places[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        long token = first + lane < vocabulary ? first + lane : vocabulary - 1;
        uint64_t id = ids ? ids[token] : token, block = id / 4 + 1;  // NumPy counts before it draws
        count += block != last;
        blocks[count - 1] = last = block;
        places[lane] = 4 * (count - 1) + id % 4;
    }
    for (int i = 0; i < count; i++) philox(blocks[i], draw, position, numbers + 4 * i);
    for (int lane = 0; lane < LANES; lane++) bits[lane] = numbers[places[lane]];
}

// Standard Gumbel noise, -log(-log u), to about 1e-6.
inline f32x16 gumbel(const uint64_t* bits) {
    float us[LANES], rests[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        double u = uniform(bits[lane]);
        us[lane] = (float)u, rests[lane] = (float)(1 - u);  // 1 - u is exact
    }
    f32x16 u = load<f32x16>(us), rest = load<f32x16>(rests);
    f32x16 exponent, fraction;
    split(u, exponent, fraction);
    i32x16 near = rest < 0.25f;
    fraction = select(near, -rest, fraction);
    exponent = select(near, splat(0.0f), exponent);
    return -log(-log_of(exponent, fraction));
}

// Chooses the tokens that are drawn after a node. One is made per node, because it needs memory.
class Drawing {
public:
    // Put the `width` tokens with the largest scores first into `best`, in descending order.
    //
    // `shown` gets their probabilities before truncation. Their values become the same; or, if the draw is
    // coupled, how clearly the noise decides for them (drafters/growth.py). Returns false if the
    // logits are not numbers, or if rounding might decide which tokens these are; but not if `rough`, which
    // lets it decide between tokens of nearly equal scores.
    bool choose(const Draw& draw, const float* logits, const float* noise, long vocabulary, int width, bool rough,
                Ranking& best, float* shown) {
        logits_ = logits, vocabulary_ = vocabulary, temperature_ = draw.temperature;
        if (!weigh()) return false;
        float floor = floor_of(draw), cut = NONE;
        int rivals = draw.coupled ? std::max(width, RIVALS) : width;
        do {  // each time, less is left of what top_p excludes
            best.order(vocabulary, std::max(width + 1, rivals), [&](long i) {
                f32x16 scaled = some(i);
                return select((scaled >= floor) & (scaled > cut), scaled + load<f32x16>(noise + i), splat(NONE));
            });
            if ((!rough && is_close(best, width)) || is_near_least(best)) return false;
        } while (draw.top_p < 1 && excludes(best, rivals, floor, draw.top_p, cut));
        if (std::isnan(cut)) return false;
        int chosen = std::min(width, best.count);
        for (int i = 0; i < chosen; i++) {
            float below = at(best.tokens[i]) - top_;
            if (!(below > -80)) return false;  // its probability may have become 0
            shown[i] = std::exp(below) / total_;
        }
        float first = best.values[0], sum = 0;
        for (int i = 0; i < best.count && i < rivals; i++) sum += std::exp(CLARITY * (best.values[i] - first));
        for (int i = 0; i < chosen; i++)
            best.values[i] = draw.coupled ? std::exp(CLARITY * (best.values[i] - first)) / sum : shown[i];
        best.count = chosen;
        return true;
    }

private:
    static constexpr float NONE = -std::numeric_limits<float>::infinity();
    static constexpr float CLARITY = 0.7f;
    static constexpr int RIVALS = 4;

    // Sixteen logits over the temperature; -infinity after the last.
    f32x16 some(long first) const { return Ranking::some(logits_, first, vocabulary_) / temperature_; }

    float at(int32_t token) const { return logits_[token] / temperature_; }

    // The largest logit and the sum of all probabilities; false if they are not numbers.
    bool weigh() {
        f32x16 largest = splat(NONE), total = {};
        for (long i = 0; i < vocabulary_; i += LANES) largest = max(some(i), largest);
        top_ = max(largest);
        for (long i = 0; i < vocabulary_; i += LANES) total += exp(some(i) - top_);
        total_ = sum(total);
        return total_ > 0 && total_ < std::numeric_limits<float>::infinity();
    }

    // Whether two of the scores that decide are so close that rounding might exchange them.
    bool is_close(const Ranking& best, int width) const {
        float doubt = 2e-4f + 1e-6f * std::fabs(top_);
        for (int i = 0; i < width && i + 1 < best.count; i++)
            if (!(best.values[i] - best.values[i + 1] > doubt)) return true;
        return false;
    }

    // Whether rounding might decide if min_p excludes one of the best. What it excludes of the others
    // is not drawn anyway.
    bool is_near_least(const Ranking& best) const {
        for (int i = 0; i < best.count; i++)
            if (std::fabs(at(best.tokens[i]) - least_) < doubt_) return true;
        return false;
    }

    // Whether one of the best is outside the nucleus; `cut` is then its logit, or NaN in doubt.
    bool excludes(const Ranking& best, int width, float floor, float top_p, float& cut) const {
        for (int i = 0; i < width && i < best.count; i++) {
            float scaled = at(best.tokens[i]);
            int inside = in_nucleus(scaled, floor, top_p);
            if (inside == 1) continue;
            cut = inside == 0 ? scaled : std::numeric_limits<float>::quiet_NaN();
            return inside == 0;
        }
        return false;
    }

    // The least logit that min_p and top_k leave, and those from which min_p can hardly be told.
    float floor_of(const Draw& draw) {
        float floor = NONE;
        least_ = NONE, doubt_ = unsure_ = 0;
        if (draw.min_p > 0) {
            float ratio = std::log(draw.min_p), doubt = 1e-4f + 1e-6f * std::fabs(top_);
            least_ = top_ + ratio;
            if (ratio < -doubt) doubt_ = doubt;  // else only the most probable token stays, in any case
            floor = std::min(least_ - doubt_, top_);
            f32x16 mass = {};
            for (long i = 0; draw.top_p < 1 && i < vocabulary_; i += LANES) {
                f32x16 x = some(i), off = x - least_;
                mass += select((off < doubt_) & (off > -doubt_), exp(x - top_), splat(0.0f));
            }
            unsure_ = sum(mass);
        }
        if (draw.top_k >= 1 && draw.top_k < vocabulary_) {
            sorted_.assign(logits_, logits_ + vocabulary_);
            std::nth_element(sorted_.begin(), sorted_.begin() + draw.top_k - 1, sorted_.end(), std::greater<float>());
            floor = std::max(floor, sorted_[draw.top_k - 1] / temperature_);
        }
        return floor;
    }

    // Whether the more probable tokens have less than `top_p` of the mass from `floor` on; -1 in doubt.
    int in_nucleus(float scaled, float floor, float top_p) const {
        f32x16 above = {}, equal = {}, kept = {};
        for (long i = 0; i < vocabulary_; i += LANES) {
            f32x16 x = some(i), mass = select(x >= floor, exp(x - top_), splat(0.0f));
            kept += mass;
            above += select(x > scaled, mass, splat(0.0f));
            equal += select(x == scaled, mass, splat(0.0f));
        }
        float others = std::max(0.0f, sum(equal) - std::exp(scaled - top_)), all = sum(kept), doubt = 1e-4f * all + unsure_;
        if (sum(above) == 0 && others < doubt) return 1;
        if (sum(above) + others + doubt < top_p * all) return 1;
        return sum(above) - doubt > top_p * all ? 0 : -1;
    }

    const float* logits_;
    long vocabulary_;
    float temperature_, top_, total_;
    float least_, doubt_;  // the least logit that min_p leaves; those that are closer to it are in doubt
    float unsure_;         // their mass, if there is a nucleus that it may be part of
    std::vector<float> sorted_;
};

}  // namespace tokenleap
