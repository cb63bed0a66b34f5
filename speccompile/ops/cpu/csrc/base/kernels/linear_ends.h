// What a linear computes around its product: a norm or a gate of its input, and a residual that is added to its output.
#pragma once

#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace speccompile {

// Of a gate. Gelu is that of the error function, GeluTanh its approximation.
enum class Activation { None, Silu, Gelu, GeluTanh };

// What a linear multiplies: rows [rows, depth] of x, normalised if there is a norm, times activation(gate) if there is a
// gate. All of `type`.
//   norm   [depth]: x / sqrt(mean(x^2) + eps), times `offset` + norm. In half precision, each multiplication is rounded,
//          but with an offset only the result is: as the models do that add one (Gemma).
//   gate   [rows, depth]
struct LinearInput {
  Type type;
  int64_t rows, depth;
  const void* x;
  const void* norm;
  float eps, offset;
  const void* gate;
  Activation activation;

  // x as it is.
  bool is_plain() const { return type == Type::Float && norm == nullptr && gate == nullptr; }
};

// Row `row` of what is multiplied, to[depth].
SPECCOMPILE_SHARED void linear_input_row(const LinearInput& input, int64_t row, float* to);

// Numbers that are of `type` already, as that type.
SPECCOMPILE_SHARED void store_row(Type type, const float* from, int64_t count, void* to);

// What a linear writes: y[rows, features], which is computed in float32, as `type`. `result` is y for float32.
//   bias      [features] of `bias_type`, or null: it is added in float32.
//   residual  [rows, features] of `type`, or null: it is added to the (rounded) sum of product and bias.
struct LinearOutput {
  Type type;
  int64_t features;
  float* y;
  void* result;
  const void* residual;
  Type bias_type;
  const void* bias;
};

// Output blocks [first, last), when y has their product.
SPECCOMPILE_SHARED void finish_blocks(const LinearOutput& output, int64_t rows, int64_t first, int64_t last);

}  // namespace speccompile
