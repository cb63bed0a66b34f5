// A tile of products of four bits by eight, by AVX512-VNNI.
#pragma once

#include "int4_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::int4 {
namespace {

constexpr int kRows = 8;

// A group of a row. Weights have no sign: each part's sum begins at its offset, which takes what is added to them off.
struct Inputs {
  int8_t numbers[kGroup];
  int32_t offsets[kParts];

  void set(const float* values, float factor) {
    for (int64_t part = 0; part < kParts; ++part) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = part * kPart; i < (part + 1) * kPart; i += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm512_cvtepi32_epi8(rounded));
        sum = _mm512_add_epi32(sum, rounded);
      }
      offsets[part] = -kOffset * _mm512_reduce_add_epi32(sum);
    }
  }
};

// Columns 0 to 15, and 16 to 31.
template <int ROWS>
using Sums = __m512[ROWS][2];

// A part's products, times the weight's scales, added to the other part's if it is the second. Not inlined: in the loop
// over steps all of the registers are wanted for these, and the compiler would keep other sums in some of them.
template <int ROWS, int LINES, int PART>
[[gnu::noinline]] void multiply_part(
    const Inputs* inputs, int64_t groups, const uint8_t* packed, const c10::Half* scales, Ahead ahead,
    int64_t first_step, Sums<ROWS>& products) {
  const __m512i low_half = _mm512_set1_epi8(15);
  __m512i whole[ROWS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    whole[row][0] = whole[row][1] = _mm512_set1_epi32(inputs[row * groups].offsets[PART]);
  }
#pragma GCC unroll 1
  for (int64_t step = 0; step < kPartSteps; ++step) {
    const __m512i both = _mm512_loadu_si512(packed + step * kStepBytes);
    const __m512i low = _mm512_and_si512(both, low_half);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
    ahead.fetch<LINES>(first_step + step);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      int32_t four;
      std::memcpy(&four, inputs[row * groups].numbers + PART * kPart + step * 4, 4);
      const __m512i own = _mm512_set1_epi32(four);
      whole[row][0] = _mm512_dpbusd_epi32(whole[row][0], low, own);
      whole[row][1] = _mm512_dpbusd_epi32(whole[row][1], high, own);
      // Products in another order would want more registers than there are.
      asm("" : "+v"(whole[row][0]), "+v"(whole[row][1]));
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 16 * i)));
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const __m512 sum = _mm512_cvtepi32_ps(whole[row][i]);
      products[row][i] = PART == 0 ? _mm512_mul_ps(sum, scale) : _mm512_fmadd_ps(sum, scale, products[row][i]);
    }
  }
}

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const uint8_t* packed, const c10::Half* scales,
    float* y, int64_t y_stride, Ahead ahead) {
  Sums<ROWS> sums = {};
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t* const weights = packed + group * kGroupBytes;
    const c10::Half* const units = scales + group * kParts * kColumns;
    const int64_t step = group * kParts * kPartSteps;
    Sums<ROWS> products;
    multiply_part<ROWS, LINES, 0>(inputs + group, groups, weights, units, ahead, step, products);
    multiply_part<ROWS, LINES, 1>(
        inputs + group, groups, weights + kPartBytes, units + kColumns, ahead, step + kPartSteps, products);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const __m512 own = _mm512_set1_ps(input_scales[row * groups + group]);
      sums[row][0] = _mm512_fmadd_ps(products[row][0], own, sums[row][0]);
      sums[row][1] = _mm512_fmadd_ps(products[row][1], own, sums[row][1]);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(y + row * y_stride, sums[row][0]);
    _mm512_storeu_ps(y + row * y_stride + 16, sums[row][1]);
  }
}

}  // namespace
}  // namespace speccompile::int4
