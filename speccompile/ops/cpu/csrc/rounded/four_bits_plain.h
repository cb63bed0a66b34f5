// A tile of products of four bits by eight, in plain C++.
#pragma once

#include "four_bits_sizes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace speccompile::four_bits {
namespace {

constexpr int kRows = 1;

// A group of a row.
template <typename>
struct Inputs {
  int8_t numbers[kGroup];

  void set(const float* values, float factor) {
    for (int64_t i = 0; i < kGroup; ++i) {
      numbers[i] = static_cast<int8_t>(std::nearbyint(values[i] * factor));
    }
  }
};

template <typename Numbers, int PARTS, int ROWS, int LINES>
void tile(
    const Inputs<Numbers>* inputs, const float* input_scales, int64_t groups, const uint8_t* packed,
    ScaleRows scales, float* y, int64_t, Ahead) {
  using Part = Parts<PARTS>;
  constexpr int64_t kHalf = kColumns / 2;
  const int32_t offset = scales.minimums() ? 0 : Numbers::kOffset;
  float sums[kColumns] = {};
  for (int64_t group = 0; group < groups; ++group) {
    float products[kColumns] = {};
    for (int64_t part = 0; part < PARTS; ++part, scales.next()) {
      int32_t whole[kColumns] = {}, own = 0;
      for (int64_t step = 0; step < Part::kSteps; ++step) {
        const int8_t* four = inputs[group].numbers + part * Part::kInputs + step * 4;
        const uint8_t* weights = packed + group * kGroupBytes + part * Part::kBytes + step * kStepBytes;
        for (int64_t i = 0; i < 4; ++i) {
          const int32_t number = four[i];
          own += number;
          for (int64_t column = 0; column < kHalf; ++column) {
            const int32_t both = weights[column * 4 + i];
            whole[column] += number * (number_of<Numbers>(both & 15) - offset);
            whole[column + kHalf] += number * (number_of<Numbers>(both >> 4) - offset);
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
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      sums[column] = std::fma(products[column], input_scales[group], sums[column]);
    }
  }
  std::copy_n(sums, kColumns, y);
}

}  // namespace
}  // namespace speccompile::four_bits
