// A tile of products of eight bits, by AVX2.
#pragma once

#include "int8_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile {
namespace {

constexpr int kRows = 2;

template <int ROWS, int LINES>
void tile8(
    const int8_t* q, const float* q_scales, int64_t groups, const int8_t* packed, const float* scales, float* y,
    int64_t y_stride, Ahead ahead) {
  __m256 sums[ROWS][4];
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      sums[row][part] = _mm256_setzero_ps();
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t group = 0; group < groups; ++group) {
    __m256i whole[ROWS][4];
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        whole[row][part] = _mm256_setzero_si256();
      }
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      const int8_t* weights = packed + group * kGroupBytes + step * kColumns * 4;
      ahead.fetch<LINES>(group * kSteps + step);
      __m256i inputs[ROWS], sizes[ROWS];
#pragma GCC unroll 2
      for (int row = 0; row < ROWS; ++row) {
        int32_t four;
        std::memcpy(&four, q + (row * groups + group) * kGroup + step * 4, 4);
        inputs[row] = _mm256_set1_epi32(four);
        sizes[row] = _mm256_abs_epi8(inputs[row]);
      }
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * part));
#pragma GCC unroll 2
        for (int row = 0; row < ROWS; ++row) {
          // The instruction takes unsigned inputs: their signs go to the weights. Nothing is above 127, so that two
          // products fit sixteen bits.
          const __m256i pairs = _mm256_maddubs_epi16(sizes[row], _mm256_sign_epi8(columns, inputs[row]));
          whole[row][part] = _mm256_add_epi32(whole[row][part], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
      const __m256 own = _mm256_set1_ps(q_scales[row * groups + group]);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const __m256 scale = _mm256_mul_ps(own, _mm256_loadu_ps(scales + group * kColumns + 8 * part));
        sums[row][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row][part]), scale, sums[row][part]);
      }
    }
  }
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      _mm256_storeu_ps(y + row * y_stride + 8 * part, sums[row][part]);
    }
  }
}

}  // namespace
}  // namespace speccompile
