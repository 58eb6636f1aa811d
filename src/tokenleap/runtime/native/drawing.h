// Draws with the noise of core/noise.py: the tokens with the largest log p + noise.
//
// noise.py and sampler.py are the readable version, whose draws these are: not to the last bit of a
// score, but where that might decide between two tokens, nothing is drawn here.

#pragma once

#include <algorithm>
#include <cmath>
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

constexpr int BLOCKS = 32, MANY = 4 * BLOCKS;

// The numbers of several blocks: first those that are the first ones of their blocks.
inline void philox(const uint64_t* blocks, const Draw& draw, uint64_t position, uint64_t numbers[4][BLOCKS]) {
#if defined(TOKENLEAP_AVX512)
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    constexpr int VECTORS = BLOCKS / 8;  // side by side, because each waits for its products
    auto product = [](u64x8 x, uint64_t y, u64x8& high, u64x8& low) {
        auto of_halves = [](u64x8 a, u64x8 b) { return (u64x8)_mm512_mul_epu32((__m512i)a, (__m512i)b); };
        u64x8 top = x >> 32, y_low = (u64x8){} + y, y_top = y_low >> 32;
        u64x8 middle = of_halves(top, y_low) + (of_halves(x, y_low) >> 32);
        u64x8 other = of_halves(x, y_top) + (middle & 0xFFFFFFFFu);
        high = of_halves(top, y_top) + (middle >> 32) + (other >> 32), low = x * y;
    };
    u64x8 a[VECTORS], b[VECTORS], c[VECTORS], d[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
        a[i] = load<u64x8>(blocks + 8 * i), b[i] = (u64x8){} + draw.trial;
        c[i] = (u64x8){} + position, d[i] = (u64x8){} + draw.stream;
    }
    uint64_t key = draw.key[0], other = draw.key[1];
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < VECTORS; i++) {
            u64x8 first_high, first_low, second_high, second_low;
            product(a[i], 0xD2E7470EE14C6C93u, first_high, first_low);
            product(c[i], 0xCA5A826395121157u, second_high, second_low);
            a[i] = second_high ^ b[i] ^ key, b[i] = second_low;
            c[i] = first_high ^ d[i] ^ other, d[i] = first_low;
        }
        key += 0x9E3779B97F4A7C15u, other += 0xBB67AE8584CAA73Bu;
    }
    std::memcpy(numbers[0], a, sizeof a), std::memcpy(numbers[1], b, sizeof b);
    std::memcpy(numbers[2], c, sizeof c), std::memcpy(numbers[3], d, sizeof d);
#else
    for (int block = 0; block < BLOCKS; block++) {
        uint64_t of_block[4];
        philox(blocks[block], draw, position, of_block);
        for (int i = 0; i < 4; i++) numbers[i][block] = of_block[i];
    }
#endif
}

// A number between 0 and 1 of 52 random bits; 1 less it is exact.
inline double uniform(uint64_t bits) { return ((double)(int64_t)(bits >> 12) + 0.5) * 0x1p-52; }

// Finds the token with the largest log p + noise.
//
// It has the least -log u / p, and 1 - u is less than -log u: so hardly any token needs its logarithm.
class Race {
public:
    // Let the tokens from `first` on, up to `last`, take part; `first` is a multiple of 4. `weigh` points to numbers
    // proportional to the probabilities of `MANY` tokens; after the last one, they may be any.
    template <class Weigh>
    void run(const Draw& draw, Weigh weigh, long first, long last) {
        uint64_t blocks[BLOCKS], numbers[4][BLOCKS];
        for (long i = first; i < last; i += MANY) {
            const float* weights = weigh(i);
            for (int block = 0; block < BLOCKS; block++) blocks[block] = i / 4 + block + 1;  // NumPy counts before it draws
            philox(blocks, draw, draw.position, numbers);
            bool near = false;  // one branch for all of them, which is hardly ever taken
            double next = next_;
            for (int lane = 0; lane < 4; lane++)
                for (int block = 0; block < BLOCKS; block++)
                    near |= !is_far(weights[4 * block + lane], numbers[lane][block], next);
            for (int token = 0; near && token < MANY && i + token < last; token++)
                look(i + token, weights[token], numbers[token % 4][token / 4]);
        }
    }

    // The same with probabilities, of the tokens `ids`, ascending, or 0, 1, ... if it is null.
    void run(const Draw& draw, const float* probabilities, const int64_t* ids, long first, long last) {
        float rest[MANY];
        auto weigh = [&](long i) -> const float* {
            if (i + MANY <= last) return probabilities + i;
            std::memcpy(rest, probabilities + i, (last - i) * sizeof(float));
            return rest;
        };
        if (!ids) return run(draw, weigh, first, last);
        uint64_t numbers[4], block = 0;
        for (long i = first; i < last; i++) {
            uint64_t id = ids[i];
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

// The random bits of `count` tokens, up to `MANY`, as in `Noise._uniform`. Of each block of four numbers there is one
// copy. No branch depends on the tokens, because it would be mispredicted.
inline void random_bits(const Draw& draw, uint64_t position, const int64_t* ids, long first, int count, long vocabulary,
                        uint64_t* bits) {
    uint64_t blocks[MANY] = {}, numbers[MANY / BLOCKS][4][BLOCKS], last = 0;
    int found = 0, places[MANY], numbers_in[MANY];
    for (int i = 0; i < count; i++) {
        long token = first + i < vocabulary ? first + i : vocabulary - 1;
        uint64_t id = ids ? ids[token] : token, block = id / 4 + 1;  // NumPy counts before it draws
        found += block != last;
        blocks[found - 1] = last = block;
        places[i] = found - 1, numbers_in[i] = id % 4;
    }
    for (int group = 0; group * BLOCKS < found; group++)
        philox(blocks + group * BLOCKS, draw, position, numbers[group]);
    for (int i = 0; i < count; i++) bits[i] = numbers[places[i] / BLOCKS][numbers_in[i]][places[i] % BLOCKS];
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

    // The token that `Noise.draw` draws, or -1 where that is not certain.
    int64_t draw(const Draw& draw, const float* logits, long vocabulary) {
        logits_ = logits, vocabulary_ = vocabulary, temperature_ = draw.temperature;
        if (!weigh()) return -1;
        float floor = floor_of(draw);
        gather(std::max(floor, draw.top_p < 1 ? below_nucleus(floor, draw.top_p) : NONE));
        for (int64_t token : tokens_)
            if (std::fabs(at(token) - least_) < doubt_) return -1;
        while (true) {
            Race race;
            race.run(draw, masses_.data(), tokens_.data(), 0, tokens_.size());
            long place = race.winner();
            if (place < 0) return -1;
            float scaled = at(tokens_[place]);
            int inside = draw.top_p < 1 ? in_nucleus(scaled, floor, draw.top_p) : 1;
            if (inside) return inside > 0 ? tokens_[place] : -1;
            gather(std::nextafter(scaled, top_));  // less probable ones are outside, too
        }
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
        if (draw.top_k >= 1 && draw.top_k < vocabulary_) floor = std::max(floor, largest(draw.top_k));
        return floor;
    }

    // The k-th largest logit, over the temperature.
    float largest(int k) {
        for (float reach = 4; reach == 4 || (long)tokens_.size() < k; reach *= 2) gather(reach < 100 ? top_ - reach : NONE);
        auto larger = [&](int64_t a, int64_t b) { return logits_[a] > logits_[b]; };
        std::nth_element(tokens_.begin(), tokens_.begin() + k - 1, tokens_.end(), larger);
        return at(tokens_[k - 1]);
    }

    // Collect the tokens from a logit on, over the temperature.
    void gather(float least) {
        tokens_.clear(), masses_.clear();
        for (long i = 0; i < vocabulary_; i += LANES) {
            f32x16 x = some(i), mass;
            if (!any(x >= least)) continue;
            mass = exp(x - top_);
            for (int lane = 0; lane < LANES && i + lane < vocabulary_; lane++)
                if (x[lane] >= least) tokens_.push_back(i + lane), masses_.push_back(mass[lane]);
        }
    }

    // A logit over the temperature that surely no token of the nucleus is below.
    float below_nucleus(float floor, float top_p) const {
        for (float reach = 4; reach < 100; reach *= 2) {
            f32x16 kept = {}, near = {};
            for (long i = 0; i < vocabulary_; i += LANES) {
                f32x16 x = some(i), mass = select(x >= floor, exp(x - top_), splat(0.0f));
                kept += mass;
                near += select(x >= top_ - reach, mass, splat(0.0f));
            }
            if (sum(near) * 0.999f > top_p * sum(kept)) return top_ - reach;
        }
        return NONE;
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
    std::vector<int64_t> tokens_;  // what `gather` found, ascending
    std::vector<float> masses_;    // in proportion to their probabilities
};

// One draw after each of several rows of logits, which masks and penalties have changed already: what noise.py draws
// from the distribution that sampler.py makes of them.
class RowDraws {
public:
    RowDraws(const Draw* draws, const float* const* logits, int rows, long vocabulary)
        : draws_(draws), logits_(logits), rows_(rows), vocabulary_(vocabulary) {}

    void begin(int threads) {
        team_.expect(threads, 1);
        pieces_ = (threads + rows_ - 1) / rows_;
        units_.resize(rows_ * pieces_);
    }

    // What each thread does. `tokens` gets the draws, or -1 where one is not certain or a logit is no number.
    void thread(int id, int64_t* tokens) {
        each(id, rows_ * pieces_, [&](int unit) { find_largest(unit); });
        each(id, rows_ * pieces_, [&](int unit) { race(unit); });
        each(id, rows_, [&](int row) {
            tokens[row] = truncates(row) ? Drawing().draw(draws_[row], logits_[row], vocabulary_) : drawn(row);
        });
    }

private:
    struct Unit {
        float largest;  // logit, over the temperature
        float total;
        Race race;
    };

    template <class Work>
    void each(int id, int count, Work work) {
        team_.each(id, [&](int part) {
            for (int i = part; i < count; i += team_.parts()) work(i);
        });
    }

    long begin_of(int unit) const { return vocabulary_ / MANY * (unit % pieces_) / pieces_ * MANY; }
    long end_of(int unit) const { return (unit + 1) % pieces_ ? begin_of(unit + 1) : vocabulary_; }

    bool truncates(int row) const {
        const Draw& draw = draws_[row];
        return draw.min_p > 0 || draw.top_p < 1 || (draw.top_k >= 1 && draw.top_k < vocabulary_);
    }

    // Sixteen logits over the temperature; -infinity after the last.
    f32x16 some(int row, long i) const { return Ranking::some(logits_[row], i, vocabulary_) / draws_[row].temperature; }

    void find_largest(int unit) {
        if (truncates(unit / pieces_)) return;
        f32x16 found = splat(-std::numeric_limits<float>::infinity());
        for (long i = begin_of(unit); i < end_of(unit); i += LANES) found = max(some(unit / pieces_, i), found);
        units_[unit].largest = max(found);
    }

    float largest_of(int row) const {
        float found = units_[row * pieces_].largest;
        for (int piece = 1; piece < pieces_; piece++) found = std::max(found, units_[row * pieces_ + piece].largest);
        return found;
    }

    void race(int unit) {
        int row = unit / pieces_;
        if (truncates(row)) return;
        float top = largest_of(row), weights[MANY];
        f32x16 total = {};
        auto weigh = [&](long first) {
            for (int lane = 0; lane < MANY; lane += LANES) {
                f32x16 mass = first + lane < vocabulary_ ? exp(some(row, first + lane) - top) : splat(0.0f);
                total += mass;
                store(weights + lane, mass);
            }
            return weights;
        };
        units_[unit].race.run(draws_[row], weigh, begin_of(unit), end_of(unit));
        units_[unit].total = sum(total);
    }

    int64_t drawn(int row) const {
        Race race;
        float total = 0;
        for (int unit = row * pieces_; unit < (row + 1) * pieces_; unit++) {
            race.join(units_[unit].race);
            total += units_[unit].total;
        }
        return total > 0 && total < std::numeric_limits<float>::infinity() ? race.winner() : -1;
    }

    const Draw* draws_;
    const float* const* logits_;
    int rows_, pieces_ = 1;
    long vocabulary_;
    Team team_;
    std::vector<Unit> units_;
};

}  // namespace tokenleap
