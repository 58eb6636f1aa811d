// The states of a drafting head's committed tokens, from the target's hidden states (`Fusion`).

#pragma once

#include "pass.h"
#include "rows.h"
#include "team.h"

namespace tokenleap {

class Fusing {
public:
    explicit Fusing(const Fusion& fusion) : f_(fusion) {}

    void begin(int threads) { team_.expect(threads, 1); }

    void thread(int id) {
        team_.each(id, [&](int part) {
            for (int node = f_.nodes * part / team_.parts(); node < f_.nodes * (part + 1) / team_.parts(); node++) join(node);
        });
        team_.each(id, [&](int part) {
            multiply<1>(f_.fc, f_.inputs, f_.nodes, part, team_.parts(), [&](long node, long panel, const float* sums) {
                narrow_to(sums, PANEL, f_.is_bf16, f_.states, node * f_.fc.outputs + panel * PANEL);
            });
        });
    }

    void meet(int id) { team_.meet(id); }

private:
    void join(int node) {
        float x[MOST_HIDDEN_SIZE];
        int size = f_.fc.inputs / f_.layers;
        uint8_t* row = f_.inputs + node * row_bytes(f_.fc);
        for (int layer = 0; layer < f_.layers; layer++) {
            widen_row(f_.hidden[(long)layer * f_.nodes + node], 0, size, f_.is_bf16, x);
            if (f_.norms) rms_norm(x, f_.norms + (long)layer * size, f_.epsilon, size, x);
            encode(f_.fc, x, row, layer * size, size);
        }
    }

    const Fusion& f_;
    Team team_;
};

}  // namespace tokenleap
