// Linears over the weights of chosen experts, see expert_linear.cpp.
#pragma once

#include <cstdint>

#include "../base/kernels/linear.h"

namespace speccompile {

// Bytes of a row of transposed weights that a panel has: less would be read from memory in pieces that are too small.
constexpr int64_t kPanelBytes = 1024;

// The weights of all experts, [experts, features, depth] or, transposed, [experts, depth, features]. bias[experts, features]
// may be null.
struct ExpertWeights {
  Type type;
  const void *weight, *bias;
  int64_t depth, features;
  bool transposed;

  // Outputs that an item of work computes, a multiple of 32.
  int64_t panel_columns() const {
    return transposed ? kPanelBytes / (type == Type::Float ? 4 : 2) : 32;
  }

  // From one input to the next one. Rows that are a power of two apart share a few sets of a cache.
  int64_t input_stride() const {
    return depth + 16;
  }

  int64_t panels() const {
    return (features + panel_columns() - 1) / panel_columns();
  }
};

// Panel `panel` of the outputs y[pairs[row], features] of inputs x[rows, depth] that have this expert, which lie
// input_stride() apart. x, y: float32.
void expert_panel(
    const ExpertWeights& of, int64_t expert, const float* x, const int64_t* pairs, int64_t rows, float* y, int64_t panel);

}  // namespace speccompile
