// A tile of products of eight bits, in plain C++.
#pragma once

#include "int8_sizes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace speccompile::int8 {
namespace {

constexpr int kRows = 1;

// A group of a row.
struct Inputs {
  int8_t rounded[kGroup];

  void set(const float* values, float factor) {
    for (int64_t i = 0; i < kGroup; ++i) {
      rounded[i] = static_cast<int8_t>(std::nearbyint(values[i] * factor));
    }
  }
};

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, int64_t parts,
    ScaleRows scales, float* y, int64_t, Ahead) {
  const Parts of_group(parts / groups);
  float sums[kColumns] = {};
  for (int64_t group = 0; group < groups; ++group) {
    float products[kColumns] = {};
    for (const Part& part : of_group) {
      int32_t whole[kColumns] = {}, own = 0;
      for (int64_t step = part.from; step < part.to; ++step) {
        const int8_t* four = inputs[group].rounded + step * 4;
        const int8_t* weights = packed + group * kGroupBytes + step * kStepBytes;
        for (int64_t i = 0; i < 4; ++i) {
          own += four[i];
          for (int64_t column = 0; column < kColumns; ++column) {
            whole[column] += static_cast<int32_t>(four[i]) * static_cast<int32_t>(weights[column * 4 + i]);
          }
        }
      }
      for (int64_t column = 0; column < kColumns; ++column) {
        float& product = products[column];
        product = std::fma(static_cast<float>(whole[column]), scales.scale(column), product);
        if (scales.minimums()) {
          product = std::fma(static_cast<float>(-own), scales.minimum(column), product);
        }
      }
      scales.next();
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      sums[column] = std::fma(products[column], input_scales[group], sums[column]);
    }
  }
  std::copy_n(sums, kColumns, y);
}

}  // namespace
}  // namespace speccompile::int8
