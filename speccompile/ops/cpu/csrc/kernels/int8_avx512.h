// A tile of products of eight bits, by AVX512-VNNI.
#pragma once

#include "int8_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::int8 {
namespace {

constexpr int kRows = 8;

// A group of a row. The instruction takes unsigned weights: 128 is added to them, and each sum begins at `offset`, which
// takes the inputs times 128 off again.
struct Inputs {
  int8_t numbers[kGroup];
  int32_t offset;

  void set(const float* values, float factor) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < kGroup; i += 16) {
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm512_cvtepi32_epi8(rounded));
      sum = _mm512_add_epi32(sum, rounded);
    }
    offset = -128 * _mm512_reduce_add_epi32(sum);
  }
};

template <int ROWS>
using Sums = __m512[ROWS][2];

// Adds a group's products. Not inlined: in the loop over steps all of the registers are wanted for these, and the
// compiler would keep the sums of the groups before in some of them.
template <int ROWS, int LINES>
[[gnu::noinline]] void add_group(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, const float* scales,
    Ahead ahead, int64_t first_step, Sums<ROWS>& sums) {
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i whole[ROWS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    whole[row][0] = whole[row][1] = _mm512_set1_epi32(inputs[row * groups].offset);
  }
  for (int64_t step = 0; step < kSteps; ++step) {
    const int8_t* weights = packed + step * kColumns * 4;
    const __m512i low = _mm512_xor_si512(_mm512_loadu_si512(weights), shift);
    const __m512i high = _mm512_xor_si512(_mm512_loadu_si512(weights + 64), shift);
    ahead.fetch<LINES>(first_step + step);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      int32_t four;
      std::memcpy(&four, inputs[row * groups].numbers + step * 4, 4);
      const __m512i own = _mm512_set1_epi32(four);
      whole[row][0] = _mm512_dpbusd_epi32(whole[row][0], low, own);
      whole[row][1] = _mm512_dpbusd_epi32(whole[row][1], high, own);
      // Products in another order would want more registers than there are.
      asm("" : "+v"(whole[row][0]), "+v"(whole[row][1]));
    }
  }
  const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + 16);
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    const __m512 own = _mm512_set1_ps(input_scales[row * groups]);
    sums[row][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][0]), _mm512_mul_ps(own, low), sums[row][0]);
    sums[row][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][1]), _mm512_mul_ps(own, high), sums[row][1]);
  }
}

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, const float* scales, float* y,
    int64_t y_stride, Ahead ahead) {
  Sums<ROWS> sums = {};
  for (int64_t group = 0; group < groups; ++group) {
    add_group<ROWS, LINES>(
        inputs + group, input_scales + group, groups, packed + group * kGroupBytes, scales + group * kColumns, ahead,
        group * kSteps, sums);
  }
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(y + row * y_stride, sums[row][0]);
    _mm512_storeu_ps(y + row * y_stride + 16, sums[row][1]);
  }
}

}  // namespace
}  // namespace speccompile::int8
