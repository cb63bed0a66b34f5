// Linears over rounded weights and inputs: int8.cpp, int4.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Inputs that share a scale.
constexpr int64_t kGroup = 64;

// A form of rounded weights: how its kernel reads inputs and multiplies.
struct RoundedForm {
  // What a row of rounded inputs takes, in bytes, aligned as new aligns: they lie as this CPU's tile reads them.
  int64_t (*input_bytes)(int64_t groups);
  // Row of x[depth] to inputs[input_bytes(groups)], zeros after depth, and scales[groups]: x is about input * scale.
  void (*round_inputs)(const float* x, int64_t depth, int64_t groups, uint8_t* inputs, float* scales);
  // Output blocks [first, last) of y[rows, features] = x * w^T + bias.
  //   inputs[rows, input_bytes(groups)] and input_scales[rows, groups] are the rounded x;
  //   packed and scales are the weight, in the form's own layout; bias may be null.
  void (*blocks)(
      const uint8_t* inputs, const float* input_scales, int64_t rows, int64_t groups, const void* packed,
      const void* scales, const float* bias, float* y, int64_t features, int64_t first, int64_t last);
  // Row of the weight, as float32: to[depth].
  void (*weight_row)(int64_t row, int64_t depth, int64_t groups, const void* packed, const void* scales, float* to);
};

// packed[ceil(features / 32), groups * 16, 32, 4] int8, scales[ceil(features / 32), groups, 32] float32.
extern const RoundedForm kInt8;
// packed[ceil(features / 32), groups * 16, 16, 4] bytes, scales[ceil(features / 32), groups * 2, 32] float16. A byte's
// low half is a number, plus 8, of columns 0 to 15, its high half one of columns 16 to 31.
extern const RoundedForm kInt4;

}  // namespace speccompile
