// A tile's sums beyond those of integers, by AVX512: of parts times their scales, and of groups times their inputs'.
#pragma once

#include "scale_rows.h"

#include <immintrin.h>

#include <cstdint>

namespace speccompile {
namespace {

template <int ROWS>
struct Scaled {
  // Columns 0 to 15, and 16 to 31.
  __m512 sums[ROWS][2] = {};
  __m512 products[ROWS][2];

  // Adds a part's integers, which is the first or the last one of its group, or both.
  //   inputs(row): the sum of the part's rounded inputs;
  //   input_scales[row * groups]: of the group.
  template <typename Inputs>
  [[gnu::always_inline]] inline void add(
      const __m512i (&whole)[ROWS][2], const ScaleRows& scales, bool first, bool last, const Inputs& inputs,
      const float* input_scales, int64_t groups) {
    __m512 part[ROWS][2];
    const __m512 scale[2] = {scales.sixteen_scales(0), scales.sixteen_scales(16)};
    if (first) {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        part[row][0] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[row][0]), scale[0]);
        part[row][1] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[row][1]), scale[1]);
      }
    } else {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        part[row][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][0]), scale[0], products[row][0]);
        part[row][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][1]), scale[1], products[row][1]);
      }
    }
    if (scales.minimums()) {
      const __m512 minimum[2] = {scales.sixteen_minimums(0), scales.sixteen_minimums(16)};
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        const __m512 input = _mm512_set1_ps(inputs(row));
        part[row][0] = _mm512_fnmadd_ps(input, minimum[0], part[row][0]);
        part[row][1] = _mm512_fnmadd_ps(input, minimum[1], part[row][1]);
      }
    }
    if (last) {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        const __m512 own = _mm512_set1_ps(input_scales[row * groups]);
        sums[row][0] = _mm512_fmadd_ps(part[row][0], own, sums[row][0]);
        sums[row][1] = _mm512_fmadd_ps(part[row][1], own, sums[row][1]);
      }
    } else {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        products[row][0] = part[row][0];
        products[row][1] = part[row][1];
      }
    }
  }

  void store(float* y, int64_t y_stride) const {
    for (int row = 0; row < ROWS; ++row) {
      _mm512_storeu_ps(y + row * y_stride, sums[row][0]);
      _mm512_storeu_ps(y + row * y_stride + 16, sums[row][1]);
    }
  }
};

}  // namespace
}  // namespace speccompile
