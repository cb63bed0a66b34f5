// A tile of products of eight bits, by AVX512-VNNI.
#pragma once

#include "int8_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile {
namespace {

constexpr int kRows = 8;

// A group of a row. The instruction takes unsigned inputs: 128 is added to them, and its share of each sum is taken off
// again.
struct Inputs {
  uint8_t shifted[kGroup];

  void set(const float* values, float factor) {
    for (int64_t i = 0; i < kGroup; i += 16) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor));
      const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(128));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(shifted + i), _mm512_cvtepi32_epi8(rounded));
    }
  }
};

template <int ROWS, int LINES>
void tile8(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, const float* scales, float* y,
    int64_t y_stride, Ahead ahead) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    sums[row][0] = sums[row][1] = _mm512_setzero_ps();
  }
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t group = 0; group < groups; ++group) {
    __m512i whole[ROWS][2], share[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      whole[row][0] = whole[row][1] = _mm512_setzero_si512();
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      const int8_t* weights = packed + group * kGroupBytes + step * kColumns * 4;
      const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 64);
      ahead.fetch<LINES>(group * kSteps + step);
      share[0] = _mm512_dpbusd_epi32(share[0], shift, low);
      share[1] = _mm512_dpbusd_epi32(share[1], shift, high);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        int32_t four;
        std::memcpy(&four, inputs[row * groups + group].shifted + step * 4, 4);
        const __m512i own = _mm512_set1_epi32(four);
        whole[row][0] = _mm512_dpbusd_epi32(whole[row][0], own, low);
        whole[row][1] = _mm512_dpbusd_epi32(whole[row][1], own, high);
      }
    }
    const __m512 low = _mm512_loadu_ps(scales + group * kColumns);
    const __m512 high = _mm512_loadu_ps(scales + group * kColumns + 16);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const __m512 own = _mm512_set1_ps(input_scales[row * groups + group]);
      const __m512 first = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole[row][0], share[0]));
      const __m512 second = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole[row][1], share[1]));
      sums[row][0] = _mm512_fmadd_ps(first, _mm512_mul_ps(own, low), sums[row][0]);
      sums[row][1] = _mm512_fmadd_ps(second, _mm512_mul_ps(own, high), sums[row][1]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(y + row * y_stride, sums[row][0]);
    _mm512_storeu_ps(y + row * y_stride + 16, sums[row][1]);
  }
}

}  // namespace
}  // namespace speccompile
