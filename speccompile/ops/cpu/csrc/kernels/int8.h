// Linears over weights and inputs of eight bits, see int8.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Inputs (and weights) that share a scale.
constexpr int64_t kGroup = 64;

// What a row of quantised inputs takes, in bytes, aligned as new aligns: they lie as this CPU's tile reads them.
int64_t input_bytes(int64_t groups);

// Row of x[depth] to inputs[input_bytes(groups)], zeros after depth, and scales[groups]: x is about input * scale.
void quantise(const float* x, int64_t depth, int64_t groups, uint8_t* inputs, float* scales);

// Output blocks [first, last) of y[rows, features] = x * w^T + bias.
//   inputs[rows, input_bytes(groups)] and input_scales[rows, groups] are the quantised x;
//   packed[ceil(features / 32), groups * kGroup / 4, 32, 4] and scales[ceil(features / 32), groups, 32] the weight;
//   bias may be null.
void int8_blocks(
    const uint8_t* inputs, const float* input_scales, int64_t rows, int64_t groups, const int8_t* packed,
    const float* scales, const float* bias, float* y, int64_t features, int64_t first, int64_t last);

}  // namespace speccompile
