// Drafts trees of the most probable or of drawn tokens, level by level (`Trees` in pass.h).
//
// model_drafter.py is the readable version, which calls a pass for each level. The calls between the
// passes of a small network take as long as the passes.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "drawing.h"
#include "run.h"

namespace tokenleap {

class Growth {
public:
    Growth(const Decoder& decoder, const Pass& first, const Trees& trees)
        : d_(decoder), t_(trees), p_(with_nodes(first, trees.widest)), run_(d_, p_), rankings_(trees.widest) {
        if (t_.draws) {
            drawings_.resize(trees.widest), decided_.resize(trees.widest), shown_.resize(trees.widest);
            noise_.resize(first.scored * panels() * LANES);
        }
        p_.nodes = first.nodes;
        for (int i = 0; i < first.scored; i++) {
            int root = first.scored_nodes[i];
            roots_.push_back({first.positions[root], first.rows[root], first.prefixes[root], first.slots[root] + 1, root});
            places_.push_back({i, -1});
        }
        drafted_.resize(first.scored);
    }

    void begin(int threads) { run_.begin(threads, 1); }

    void thread(int id) {
        for (int level = 0; p_.nodes; level++) {
            if (t_.draws) shake(level, id);
            run_.thread(id);
            run_.meet(id);  // the pass is read no more, and is about to change
            run_.share(p_.scored, id, [&](int i) { rank(i, t_.widths[level]); });
            run_.meet(id);
            if (id == 0) extend(level + 1);
            run_.meet(id);
        }
    }

private:
    static constexpr int AT_ONCE = MANY / LANES;  // panels of noise: a processor works on several of them at a time

    struct Root {
        int32_t position, row, prefix;
        int32_t next_slot;  // for the tree's next node
        int32_t place;      // among the nodes of the first pass
    };
    struct Drafted {
        int32_t parent;  // -1 for the root
        double path;     // probability of the path down to the node
        int32_t slot, place;  // of the node in the slab and in its pass; set when it is computed
    };
    struct Place {
        int32_t tree, node;  // -1 for the root
    };

    static Pass with_nodes(Pass pass, int32_t nodes) {
        pass.nodes = nodes;
        return pass;
    }

    long vocabulary() const { return d_.head.outputs; }

    long panels() const { return (vocabulary() + LANES - 1) / LANES; }

    float* noise(int tree) { return noise_.data() + tree * panels() * LANES; }

    // The noise of the next level, of the trees that still grow.
    void shake(int depth, int id) {
        int last = -1;
        for (Place at : places_) {
            if (at.tree == last) continue;
            last = at.tree;
            const Draw& draw = t_.draws[last];
            long begin = panels() * id / run_.threads(), end = panels() * (id + 1) / run_.threads();
            for (long at = begin; at < end; at += AT_ONCE) {
                uint64_t bits[MANY];
                int count = std::min<long>(AT_ONCE, end - at);
                random_bits(draw, draw.position + depth, t_.token_ids, at * LANES, count * LANES, vocabulary(), bits);
                for (int i = 0; i < count; i++) store(noise(last) + (at + i) * LANES, gumbel(bits + i * LANES));
            }
        }
    }

    // The children of the i-th scored node.
    void rank(int i, int width) {
        const float* logits = p_.logits + i * vocabulary();
        int tree = places_[i].tree;
        if (t_.draws)
            decided_[i] = drawings_[i].choose(t_.draws[tree], logits, noise(tree), vocabulary(), width, t_.beam > 0,
                                              rankings_[i], shown_[i].data());
        else
            rankings_[i].rank(logits, vocabulary(), width);
    }

    // Add a level of nodes at this depth to each tree; some of them are the nodes of the next pass.
    void extend(int depth) {
        std::vector<Place> next;
        for (size_t i = 0; i < places_.size();) {  // the nodes of a tree lie together
            int tree = places_[i].tree;
            std::vector<int32_t> level;
            for (; i < places_.size() && places_[i].tree == tree; i++) {
                if (t_.draws && !decided_[i]) t_.trees[tree].undecided = 1;
                else add_children(places_[i], i, level);
            }
            t_.trees[tree].levels = depth;
            for (int32_t node : frontier(tree, depth, level)) next.push_back({tree, node});
        }
        places_ = next;
        if (t_.beam && places_.empty())
            for (size_t tree = 0; tree < drafted_.size(); tree++) prune(tree);
        if (t_.draws && !t_.beam) kept_ += p_.scored, p_.logits += p_.scored * vocabulary();
        load(depth);
    }

    // Add the children of the i-th scored node; `level` gets those that may have children themselves.
    void add_children(Place of, int scored, std::vector<int32_t>& level) {
        const Ranking& best = rankings_[scored];
        Tree& tree = t_.trees[of.tree];
        std::vector<Drafted>& nodes = drafted_[of.tree];
        double above = of.node < 0 ? 1.0 : nodes[of.node].path;
        for (int i = 0; i < best.count && best.values[i] != 0; i++) {
            long at = (long)of.tree * t_.most + tree.drafted;
            double probability = best.values[i], path = above * probability;
            t_.tokens[at] = t_.token_ids ? t_.token_ids[best.tokens[i]] : best.tokens[i];
            t_.parents[at] = of.node;
            t_.probabilities[at] = best.values[i];
            if (t_.draws) t_.sources[at] = kept_ + scored, t_.shown[at] = shown_[scored][i];
            nodes.push_back({of.node, path, 0, 0});
            // Never for NaN, which the caller refuses.
            if (probability >= tree.least_token && path >= tree.least_path) level.push_back(tree.drafted);
            tree.drafted++;
        }
    }

    // The nodes of a level that get children.
    std::vector<int32_t> frontier(int number, int depth, std::vector<int32_t> level) const {
        const Tree& tree = t_.trees[number];
        if (tree.undecided || depth >= tree.depth || depth >= t_.levels) return {};
        if (!t_.beam) return tree.drafted >= tree.nodes ? std::vector<int32_t>() : level;
        const std::vector<Drafted>& nodes = drafted_[number];
        std::stable_sort(level.begin(), level.end(), [&](int a, int b) { return nodes[a].path > nodes[b].path; });
        if ((int)level.size() > t_.beam) level.resize(t_.beam);
        return level;
    }

    // Keep the most probable nodes, and of equals those closer to the root: `Dynamic.kept` in shapes.py.
    void prune(int number) {
        Tree& tree = t_.trees[number];
        const std::vector<Drafted>& nodes = drafted_[number];
        if (tree.drafted <= tree.nodes) return;
        std::vector<int32_t> depths, best;
        for (const Drafted& node : nodes) {
            if (std::isnan(node.path)) return;  // the caller refuses it
            best.push_back(depths.size());
            depths.push_back(node.parent < 0 ? 0 : depths[node.parent] + 1);
        }
        std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return nodes[a].path > nodes[b].path; });
        best.resize(tree.nodes);
        std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return depths[a] < depths[b]; });
        std::vector<int32_t> places(nodes.size());
        for (size_t i = 0; i < best.size(); i++) places[best[i]] = i;
        long first = (long)number * t_.most;
        auto keep = [&](auto* of_nodes) {
            if (!of_nodes) return;
            std::vector<std::decay_t<decltype(*of_nodes)>> all(of_nodes + first, of_nodes + first + nodes.size());
            for (size_t i = 0; i < best.size(); i++) of_nodes[first + i] = all[best[i]];
        };
        keep(t_.tokens), keep(t_.parents), keep(t_.probabilities);
        for (size_t i = 0; i < best.size(); i++) {
            int32_t& parent = t_.parents[first + i];
            if (parent >= 0) parent = places[parent];
        }
        tree.drafted = tree.nodes;
    }

    // Make the pass over `places_`, all of which are to have logits.
    void load(int depth) {
        tokens_.clear(), positions_.clear(), rows_.clear(), slots_.clear(), prefixes_.clear();
        tails_.clear(), tail_starts_.assign(1, 0), scored_.clear();
        for (Place at : places_) {
            Root& root = roots_[at.tree];
            Drafted& node = drafted_[at.tree][at.node];
            node.slot = root.next_slot++;
            node.place = tokens_.size();
            tokens_.push_back(t_.tokens[(long)at.tree * t_.most + at.node]);
            positions_.push_back(root.position + depth);
            rows_.push_back(root.row);
            slots_.push_back(node.slot);
            scored_.push_back(node.place);
            see(at);
        }
        if (p_.hidden) take_states();
        p_.nodes = p_.scored = places_.size();
        p_.tokens = tokens_.data(), p_.positions = positions_.data(), p_.rows = rows_.data();
        p_.slots = slots_.data(), p_.prefixes = prefixes_.data(), p_.tails = tails_.data();
        p_.tail_starts = tail_starts_.data(), p_.scored_nodes = scored_.data();
    }

    // A node sees what the root sees, its ancestors and itself.
    void see(Place at) {
        std::vector<int32_t> path;
        const std::vector<Drafted>& nodes = drafted_[at.tree];
        for (int node = at.node; node >= 0; node = nodes[node].parent) path.push_back(nodes[node].slot);
        int32_t prefix = roots_[at.tree].prefix;
        while (!path.empty() && path.back() == prefix) path.pop_back(), prefix++;
        prefixes_.push_back(prefix);
        tails_.insert(tails_.end(), path.rbegin(), path.rend());
        tail_starts_.push_back(tails_.size());
    }

    // The state of each node is its parent's output in the last pass.
    void take_states() {
        size_t size = d_.hidden_size * (d_.is_bf16 ? sizeof(bf16) : sizeof(float));
        states_.resize(places_.size() * size);
        for (size_t i = 0; i < places_.size(); i++) {
            const std::vector<Drafted>& nodes = drafted_[places_[i].tree];
            int parent = nodes[places_[i].node].parent;
            int place = parent < 0 ? roots_[places_[i].tree].place : nodes[parent].place;
            std::memcpy(states_.data() + i * size, p_.hidden + place * size, size);
        }
        p_.states = states_.data();
    }

    const Decoder& d_;
    const Trees& t_;
    Pass p_;
    Run run_;
    std::vector<Ranking> rankings_;              // of the scored nodes
    std::vector<Drawing> drawings_;              // of the scored nodes, if they draw
    std::vector<uint8_t> decided_;               // whether they could
    std::vector<std::array<float, Ranking::MOST>> shown_;  // and the probabilities of what they drew
    std::vector<float> noise_;                   // [L, V] of a level, up to a multiple of sixteen tokens
    int32_t kept_ = 0;                           // rows of logits that are kept
    std::vector<Place> places_;                  // of the scored nodes in their trees
    std::vector<Root> roots_;                    // of each tree
    std::vector<std::vector<Drafted>> drafted_;  // of each tree: its nodes
    std::vector<int64_t> tokens_;                // of the pass, as in `Pass`
    std::vector<int32_t> positions_, rows_, slots_, prefixes_, tail_starts_, tails_, scored_;
    std::vector<uint8_t> states_;
};

}  // namespace tokenleap
