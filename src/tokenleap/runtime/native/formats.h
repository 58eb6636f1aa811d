// What linear layers read: packed weights in eight formats, and their input rows.
//
// A weight [N, K] is cut into panels of 32 outputs. A panel is stored in the order in which kernels
// read it.
//
//   format  weights of a panel                                                  input row
//   F32     [K][32] float32                                                     float32
//   BF16    [K/2][32][2] bfloat16                                               bfloat16
//   INT8    [K/32] of ([8][32][4] uint8: w/d + 128; [32] half: d)               Bytes
//   INT4    [K/32] of ([4][32][4] two nibbles: (w-m)/d; [32] half: d; half: m)  Bytes
//   INT5    the same with bit 4 of all words, [32][4], after the nibbles       Bytes
//
//   Q4K, Q5K, Q6K   see k_blocks.h                                              Bytes
//
// `Bytes` are int8 in groups of 32 with one scale each, quantized from the input row at run time.

#pragma once

#include "k_blocks.h"

namespace tokenleap {

constexpr int PANEL = 32;
constexpr int GROUP = 32;

enum class Format : int32_t { F32, BF16, INT8, INT4, INT5, Q4K, Q5K, Q6K };

// Bits of a weight of a K-quant; 0 for other formats.
inline int k_bits(Format format) { return format < Format::Q4K ? 0 : 4 + (int)format - (int)Format::Q4K; }

// `CLinear` in pack.py has the same layout.
struct Linear {
    const uint8_t* weight;
    const float* bias;  // [outputs] or null
    Format format;
    int32_t inputs;
    int32_t outputs;  // multiple of PANEL but for the head's last panel
    Format rows;      // of its inputs: its own, or the highest of those beside it that read Bytes
    int32_t passing;  // whether its weights are not to stay in the caches after they were read
};

// Sizes

inline size_t group_bytes(Format format) {
    if (format == Format::INT8) return GROUP * PANEL + 2 * PANEL;
    return GROUP * PANEL / 2 + (format == Format::INT5 ? GROUP * PANEL / 8 : 0) + 4 * PANEL;
}

inline size_t panel_bytes(Format format, int inputs) {
    if (format == Format::F32) return sizeof(float) * PANEL * inputs;
    if (format == Format::BF16) return sizeof(bf16) * PANEL * inputs;
    if (int bits = k_bits(format)) return k_panel_bytes(bits, inputs);
    return group_bytes(format) * (inputs / GROUP);
}

// A row of Bytes: [K] int8, then [K/32] each of scale, scale * sum and -128 * sum.
inline size_t row_bytes(Format format, int inputs) {
    size_t size = format == Format::F32    ? sizeof(float) * inputs
                  : format == Format::BF16 ? sizeof(bf16) * inputs
                                           : inputs + (format == Format::Q6K ? 5 : 3) * sizeof(float) * (inputs / GROUP);
    return (size + 63) / 64 * 64;
}

inline size_t row_bytes(const Linear& layer) { return row_bytes(layer.rows, layer.inputs); }

// Inputs

inline void quantize(const float* from, uint8_t* row, int inputs, int offset) {
    f32x16 low = load<f32x16>(from), high = load<f32x16>(from + LANES);
    float largest = max(max(max(low, -low), max(high, -high)));
    float steps = largest > 1e-30f ? 127.0f / largest : 0.0f;
    i32x16 first = nearest(low * steps), second = nearest(high * steps);
    store_bytes((int8_t*)row + offset, first);
    store_bytes((int8_t*)row + offset + LANES, second);
    int32_t total = sum(first + second);
    int groups = inputs / GROUP, group = offset / GROUP;
    float* scales = (float*)(row + inputs);
    // Integers cannot represent NaN or infinity, so the scale carries them to the output.
    float scale = largest / 127.0f + 0.0f * sum(low + high);
    scales[group] = scale;
    scales[groups + group] = scale * total;
    ((int32_t*)scales)[2 * groups + group] = -128 * total;
}

// Put `count` values at `offset` of an input row of a layer; both are multiples of GROUP.
inline void encode(const Linear& layer, const float* from, uint8_t* row, int offset, int count) {
    Format format = layer.rows;
    for (int i = 0; i < count; i += GROUP) {
        if (format == Format::F32) {
            std::memcpy((float*)row + offset + i, from + i, sizeof(float) * GROUP);
        } else if (format == Format::BF16) {
            for (int part = 0; part < GROUP; part += LANES)
                store((bf16*)row + offset + i + part, narrow(load<f32x16>(from + i + part)));
        } else {
            quantize(from + i, row, layer.inputs, offset + i);
            if (format == Format::Q6K) put_halves(row, layer.inputs, offset + i);
        }
    }
}

// Prefetches weights while a kernel computes: the processor's own prefetching does not look far enough ahead to overlap
// both.
class Prefetch {
public:
    // What a kernel that reads a panel only once reads next. Into all caches, less of it comes in time further ahead.
    static Prefetch soon(const uint8_t* panel, size_t bytes, bool passing) {
        return passing ? Prefetch(panel + 8192, bytes, 0) : Prefetch(panel + 2048, bytes, 3);
    }

    // What is read after this call, into the second cache.
    static Prefetch later(const uint8_t* from, size_t bytes) { return {from, bytes, 2}; }

    // Spread the prefetch over this many calls of `some`.
    void split_into(int parts) { step_ = bytes_ / parts; }

    void some() {
        stop_ += step_;
        if (locality_ == 0) prefetch<0>();
        else if (locality_ == 2) prefetch<2>();
        else prefetch<3>();
    }

private:
    Prefetch(const uint8_t* from, size_t bytes, int locality)
        : from_(from), stop_(from), bytes_(bytes), locality_(locality) {}

    template <int LOCALITY>
    void prefetch() {
        for (; from_ < stop_; from_ += 64) __builtin_prefetch(from_, 0, LOCALITY);
    }

    const uint8_t *from_, *stop_;
    size_t bytes_, step_ = 0;
    int locality_;
};

// A panel times some rows, [rows][PANEL] out.
using Kernel = void (*)(const uint8_t* panel, const uint8_t* rows, size_t stride, int inputs, Prefetch ahead, float* out);

}  // namespace tokenleap
