// Linears over weights and inputs of eight bits, see int8.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Inputs (and weights) that share a scale.
constexpr int64_t kGroup = 64;

// Row of x[depth] to int8 q[groups * kGroup], zeros behind depth, and scales[groups]; x is about q * scale.
void quantise(const float* x, int64_t depth, int64_t groups, int8_t* q, float* scales);

// Output blocks [first, last) of y[rows, features] = x * w^T + bias.
//   q[rows, groups * kGroup] and q_scales[rows, groups] are the inputs;
//   packed[ceil(features / 32), groups * kGroup / 4, 32, 4] and scales[ceil(features / 32), groups, 32] the weight;
//   bias may be null.
void int8_blocks(
    const int8_t* q, const float* q_scales, int64_t rows, int64_t groups, const int8_t* packed, const float* scales,
    const float* bias, float* y, int64_t features, int64_t first, int64_t last);

}  // namespace speccompile
