// The arguments of a pass. structures.py repeats the structures.

#pragma once

#include "linear.h"
#include "rows.h"

namespace tokenleap {

struct Layer {
    // One linear layer, or several whose outputs follow one another, with a format each. They read the same rows.
    Linear qkv[3];
    Linear output;
    Linear source_query, source_output;  // of attention to a source; null weights without one
    Linear gate_up[2];  // one, with gate and up in turns of PANEL outputs, or each alone; without gates, the first only
    Linear down;
    Norm attention_norm, source_norm, mlp_norm;  // see `Decoder::norms_sums`
    const float *query_norm, *key_norm;          // null where nothing is normalised
    const float *attention_after, *mlp_after;  // norms of what is added to the residual stream
    int32_t index, attends, computes;
    int32_t window;  // positions up to its own that a node sees; 0 for all
    int32_t angles;  // the table of rotary angles; -1 for none
    int32_t unused;
};

enum class Activation : int32_t { SILU, GELU_TANH, GELU, RELU };

struct Decoder {
    const Layer* layers;
    Linear head;
    Norm norm;                 // of what the head reads
    const uint8_t* embedding;  // [V, E] in the model's dtype
    const uint8_t* more;       // [.., E] the same of token ids from V on, or null
    int64_t vocabulary;        // V
    int32_t num_layers, hidden_size, heads, key_heads, width, intermediate;
    int32_t is_bf16;  // dtype of embedding and slab; float32 otherwise
    float epsilon, scaling;
    // `Traits` in runtime/llama.py, with Llama's values in brackets.
    float embedding_scale, residual_scale, logit_scale;  // (1)
    float logit_cap, score_cap;                          // c of c tanh(x / c); none (0)
    Activation activation;
    int32_t whole_norms, ungated;                        // (0)
    int32_t norms_sums;  // whether a layer's norms are of the stream after each part, instead of its inputs (0)
    // An embedding of each position, [.., E], beside that of the token; null if there is none (null). One token may
    // have none (-1).
    const float* position_embedding;
    int64_t embedded_positions, unplaced_token;
    // What scores of self-attention get by the distance from what a node sees to the node, [heads, behind + 1 + before];
    // the first and the last one hold for larger distances, too (null). Not with windows.
    const float* distance_bias;
    int64_t distances_before, distances_behind;
    int64_t distance_bias_stride;  // from a layer's to the next one's; 0 if all layers have the same
    // A drafting head reads a state beside each token; its first layer's inputs are twice as wide:
    // the normalised embedding, then the normalised state. Null norms for a language model.
    int32_t norm_before_residual;  // whether the stream begins with the normalised state
    int32_t norm_output;           // whether hidden states after the last layer are normalised; an encoder's are, too
    Norm embedding_norm;           // of an encoder-decoder, too: of what the stream begins with
    const float* state_norm;
    // Or a head's stream begins with this layer of embedding and state, as they are (EAGLE-1). Null weight if not.
    Linear mix;
};

// Keys and values of a layer, [rows, G, S, D] each.
struct Buffers {
    uint8_t *keys, *values;
    int64_t key_slots, value_slots;  // S
};

// What rows read of a source: keys and values of all layers, [layers, H, span, D] each.
struct Source {
    const uint8_t *keys, *values;
    int64_t span, positions;
};

struct Pass {
    int32_t nodes, scored, threads, most_seen;
    int64_t angles;              // positions of a table
    const int64_t* tokens;       // [T]
    const uint8_t* states;       // [T, E] in the model's dtype, for a drafting head
    const int32_t* positions;    // [T]
    const int32_t* rows;         // [T] of the slab
    const int32_t* slots;        // [T] where a node's keys and values go
    const int32_t* prefixes;     // [T] slots seen from the row's beginning on
    const int32_t* tail_starts;  // [T + 1] offsets into tails
    const int32_t* tails;        // slots seen after the prefix
    const int32_t* scored_nodes; // [L] ascending: the nodes whose logits are needed
    const Buffers* buffers;      // of each layer
    const Source* sources;       // of each row of the slab; null for a decoder without sources
    const float *cos, *sin;      // [tables, positions, D/2]
    float* logits;               // [L, V]
    int64_t* argmax;             // [L] the token of the largest logit, the first of equals; -1 if that is infinite or NaN
    uint8_t* hidden;             // [layers asked for, T, E] in the model's dtype, or null
    const int32_t* hidden_slots; // [num_layers + 1] index of a layer's input among those, or -1
    uint8_t* workspace;
};

// A tree that is drafted after a node of a pass, its root.
struct Tree {
    double least_token, least_path;  // nothing is drafted below a token of a smaller probability, or path
    int32_t depth, nodes;            // levels at most; it ends with the level that reaches so many nodes
    int32_t drafted, undecided;      // nodes so far, 0 at first; whether rounding might decide on the next
    int32_t levels;                  // that have grown, 0 at first
};

// How a tree draws its tokens: the noise of its request (core/noise.py) and what truncates q.
struct Draw {
    uint64_t key[2];             // of Philox
    uint64_t trial, stream;      // words 1 and 3 of its counter
    uint64_t position;           // of the root's successor: word 2, less the depth
    float temperature, min_p, top_p;
    int32_t top_k;
    int32_t coupled, unused;     // whether the noise is the target's own
};

// Trees of the most probable or of drawn tokens, one after each scored node of a pass. A drafting head goes
// on from its own states: then the pass returns the hidden states after the last layer, and no others.
//
// Siblings are drawn without replacement. Without `beam`, the logits of all passes are then kept, one after
// the other. With it, trees end with their depth, and of more than `Tree::nodes` the most probable are kept.
// Probabilities of coupled draws say how clearly the noise decides (`Drawing` in drawing.h).
struct Trees {
    Tree* trees;               // [L]
    const int64_t* token_ids;  // [V] the tokens that logits stand for; null if these are 0, 1, ...
    const int32_t* widths;     // [levels] children of each node that gets any, at depths 0 (roots), 1, ...
    int32_t levels, beam;      // nodes of a level that get children: the most probable; 0 for all of them
    int32_t most, widest;      // nodes of a tree and of a pass at most
    int64_t* tokens;           // [L, most]
    int32_t* parents;          // [L, most] a drafted node, or -1 for the root
    float* probabilities;      // [L, most]
    const Draw* draws;         // [L], or null for the most probable tokens
    int32_t* sources;          // [L, most] the row of the logits that a token was drawn from
    float* shown;              // [L, most] its probability before truncation
};

// States of T tokens: one linear layer of the hidden states of some layers, each normalised.
struct Fusion {
    Linear fc;                     // layers E -> E
    const float* norms;            // [layers, E] weights of RMSNorms, or null
    const uint8_t* const* hidden;  // [layers, T] of [E] in the model's dtype
    uint8_t* inputs;               // [T] memory for the inputs of fc
    uint8_t* states;               // [T, E] in the model's dtype
    int32_t layers, nodes, threads, is_bf16;
    float epsilon;
};

}  // namespace tokenleap
