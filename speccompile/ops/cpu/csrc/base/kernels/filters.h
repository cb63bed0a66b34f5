// Temperature, top-k, top-p and min-p of one place, see filters.cpp.
#pragma once

#include "choose.h"

namespace speccompile {

// Options of a row, as the state of the processors has them (speccompile/sampling/filters.py).
struct Filters {
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;

  bool any() const {
    return top_k > 0 || top_p < 1.0f || min_p > 0.0f;
  }
};

// Scores [first, last) divided by the temperature, in float32; 0 divides by 1.
void divide(Type type, const void* scores, int64_t first, int64_t last, float temperature, float* to);

// What top-k, top-p and min-p remove of scores[vocab] becomes -inf.
void filter(float* scores, int64_t vocab, const Filters& filters);

// The least of scores[vocab] that top-p keeps; speccompile/ops/greatest.py defines it.
float top_p_threshold(const float* scores, int64_t vocab, float top_p);

// The least of scores[vocab] that min-p keeps; speccompile/ops/greatest.py defines it.
float min_p_threshold(const float* scores, int64_t vocab, float min_p);

}  // namespace speccompile
