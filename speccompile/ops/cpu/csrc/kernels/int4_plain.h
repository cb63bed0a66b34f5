// A tile of products of four bits by eight, in plain C++.
#pragma once

#include "int4_sizes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace speccompile::int4 {
namespace {

constexpr int kRows = 1;

// A group of a row.
struct Inputs {
  int8_t numbers[kGroup];

  void set(const float* values, float factor) {
    for (int64_t i = 0; i < kGroup; ++i) {
      numbers[i] = static_cast<int8_t>(std::nearbyint(values[i] * factor));
    }
  }
};

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const uint8_t* packed, const c10::Half* scales,
    float* y, int64_t, Ahead) {
  constexpr int64_t kHalf = kColumns / 2;
  float sums[kColumns] = {};
  for (int64_t group = 0; group < groups; ++group) {
    float products[kColumns];
    for (int64_t part = 0; part < kParts; ++part) {
      int32_t whole[kColumns] = {};
      for (int64_t step = 0; step < kPartSteps; ++step) {
        const int8_t* four = inputs[group].numbers + part * kPart + step * 4;
        const uint8_t* weights = packed + group * kGroupBytes + part * kPartBytes + step * kStepBytes;
        for (int64_t column = 0; column < kHalf; ++column) {
          for (int64_t i = 0; i < 4; ++i) {
            const int32_t both = weights[column * 4 + i], number = four[i];
            whole[column] += number * ((both & 15) - kOffset);
            whole[column + kHalf] += number * ((both >> 4) - kOffset);
          }
        }
      }
      for (int64_t column = 0; column < kColumns; ++column) {
        const float scale = scales[(group * kParts + part) * kColumns + column];
        const float sum = static_cast<float>(whole[column]);
        products[column] = part == 0 ? sum * scale : std::fma(sum, scale, products[column]);
      }
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      sums[column] = std::fma(products[column], input_scales[group], sums[column]);
    }
  }
  std::copy_n(sums, kColumns, y);
}

}  // namespace
}  // namespace speccompile::int4
