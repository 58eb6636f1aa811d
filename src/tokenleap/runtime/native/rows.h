// Rows of numbers: from and to the model's dtype, and norms.

#pragma once

#include <cmath>

#include "simd.h"

namespace tokenleap {

constexpr int MOST_HIDDEN_SIZE = 16384;

// Row `row` of a [.., size] matrix in the model's dtype, as floats.
inline void widen_row(const uint8_t* matrix, int64_t row, int size, bool is_bf16, float* to) {
    for (int i = 0; i < size; i += LANES) {
        int64_t place = row * size + i;
        store(to + i, is_bf16 ? widen((const bf16*)matrix + place) : load<f32x16>((const float*)matrix + place));
    }
}

// Put `size` floats at `place` of a tensor in the model's dtype.
inline void narrow_to(const float* from, int size, bool is_bf16, uint8_t* tensor, int64_t place) {
    for (int i = 0; i < size; i += LANES) {
        if (is_bf16) store((bf16*)tensor + place + i, narrow(load<f32x16>(from + i)));
        else store((float*)tensor + place + i, load<f32x16>(from + i));
    }
}

inline void rms_norm(const float* from, const float* weight, float epsilon, int size, float* to) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += LANES) {
        f32x16 x = load<f32x16>(from + i);
        squares = fma(x, x, squares);
    }
    float scale = 1.0f / std::sqrt(sum(squares) / size + epsilon);
    for (int i = 0; i < size; i += LANES)
        store(to + i, load<f32x16>(from + i) * scale * load<f32x16>(weight + i));
}

// RMSNorm, or LayerNorm where there is a bias; rows stay as they are without a weight. `Norm` has the same layout in
// structures.py.
struct Norm {
    const float *weight, *bias;
};

inline void layer_norm(const float* from, const Norm& norm, float epsilon, int size, float* to) {
    f32x16 total = {}, squares = {};
    for (int i = 0; i < size; i += LANES) total += load<f32x16>(from + i);
    float mean = sum(total) / size;
    for (int i = 0; i < size; i += LANES) {
        f32x16 x = load<f32x16>(from + i) - mean;
        squares = fma(x, x, squares);
    }
    float scale = 1.0f / std::sqrt(sum(squares) / size + epsilon);
    for (int i = 0; i < size; i += LANES) {
        f32x16 x = (load<f32x16>(from + i) - mean) * scale;
        store(to + i, fma(x, load<f32x16>(norm.weight + i), load<f32x16>(norm.bias + i)));
    }
}

inline void normalise_row(const float* from, const Norm& norm, float epsilon, int size, float* to) {
    if (norm.bias) layer_norm(from, norm, epsilon, size, to);
    else rms_norm(from, norm.weight, epsilon, size, to);
}

}  // namespace tokenleap
