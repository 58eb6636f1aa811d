// The arguments of a pass, and the barrier of its threads. arguments.py repeats the structures.

#pragma once

#include <sched.h>

#include <atomic>

#include "linear.h"

namespace foretoken {

struct Layer {
    Linear qkv, output, gate_up, down;  // gate and up in turns of PANEL outputs
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;
    int32_t index, attends, computes, unused;
};

struct Decoder {
    const Layer* layers;
    Linear head;
    const float* norm;
    const uint8_t* embedding;  // [V, E] in the model's dtype
    int32_t num_layers, hidden_size, heads, key_heads, width, intermediate;
    int32_t is_bf16;  // dtype of embedding and slab; float32 otherwise
    float epsilon, scaling;
    // A drafting head reads a state beside each token; its first layer's inputs are twice as wide:
    // the normalised embedding, then the normalised state. Null norms for a language model.
    int32_t norm_before_residual;  // whether the stream begins with the normalised state
    int32_t norm_output;           // whether hidden states behind the last layer are normalised
    const float *embedding_norm, *state_norm;
};

// Keys and values of a layer, [rows, G, S, D] each.
struct Buffers {
    uint8_t *keys, *values;
    int64_t key_slots, value_slots;  // S
};

struct Pass {
    int32_t nodes, need_logits, threads, most_seen;
    const int64_t* tokens;       // [T]
    const uint8_t* states;       // [T, E] in the model's dtype, for a drafting head
    const int32_t* positions;    // [T]
    const int32_t* rows;         // [T] of the slab
    const int32_t* slots;        // [T] where a node's keys and values go
    const int32_t* prefixes;     // [T] slots seen from the row's beginning on
    const int32_t* tail_starts;  // [T + 1] offsets into tails
    const int32_t* tails;        // slots seen behind the prefix
    const Buffers* buffers;      // of each layer
    const float *cos, *sin;      // [positions, D/2]
    float* logits;               // [T, V]
    int64_t* argmax;             // [T] the token of the largest logit, the first of equals
    uint8_t* hidden;             // [layers asked for, T, E] in the model's dtype, or null
    const int32_t* hidden_slots; // [num_layers + 1] index of a layer's input among those, or -1
    uint8_t* workspace;
};

// Where threads wait for each other. They spin, because the parts of a layer take microseconds, and
// yield after a while, because the machine may be busy.
class Barrier {
public:
    void expect(int threads) { threads_ = threads; }

    void wait() {
        if (threads_ == 1) return;
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
            if (spins > 2000) sched_yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }

private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    int threads_ = 1;
};

}  // namespace foretoken
