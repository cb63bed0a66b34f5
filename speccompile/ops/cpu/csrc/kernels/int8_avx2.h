// A tile of products of eight bits, by AVX2.
#pragma once

#include "int8_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::int8 {
namespace {

constexpr int kRows = 2;
constexpr int kParts = kColumns / 8;

// A group of a row. The instruction takes unsigned inputs: a negative one's size, and the weights' bits are turned over
// (`flips` is -1), which makes -w - 1 of w. What is missing then, its size once, is `missing` for all of the group.
struct Inputs {
  uint8_t sizes[kGroup];
  int8_t flips[kGroup];
  int32_t missing;

  void set(const float* values, float factor) {
    const __m256i zeros = _mm256_setzero_si256();
    __m256i sums = zeros;
    for (int64_t i = 0; i < kGroup; i += 32) {
      const auto eight = [&](int64_t at) {
        return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + i + at), _mm256_set1_ps(factor)));
      };
      const __m256i first = _mm256_packs_epi32(eight(0), eight(8)), second = _mm256_packs_epi32(eight(16), eight(24));
      // Packs go on in each half of a register.
      const __m256i rounded = _mm256_permutevar8x32_epi32(
          _mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      const __m256i size = _mm256_abs_epi8(rounded), flip = _mm256_cmpgt_epi8(zeros, rounded);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sizes + i), size);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(flips + i), flip);
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_and_si256(size, flip), zeros));
    }
    alignas(32) int64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), sums);
    missing = static_cast<int32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
  }
};

template <typename T>
__m256i four_of(const T* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

template <int ROWS>
using Sums = __m256i[ROWS][kParts];

// A group's products. Not inlined: beside a tile's other sums the compiler would keep these in memory.
template <int ROWS, int LINES>
[[gnu::noinline]] void add_group(
    const Inputs* inputs, int64_t groups, int64_t group, const int8_t* packed, Ahead ahead, Sums<ROWS>& sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i whole[ROWS][kParts];
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      whole[row][part] = _mm256_set1_epi32(inputs[row * groups + group].missing);
    }
  }
  for (int64_t step = 0; step < kSteps; ++step) {
    const int8_t* weights = packed + group * kGroupBytes + step * kColumns * 4;
    ahead.fetch<LINES>(group * kSteps + step);
    __m256i sizes[ROWS], flips[ROWS];
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
      sizes[row] = four_of(inputs[row * groups + group].sizes + step * 4);
      flips[row] = four_of(inputs[row * groups + group].flips + step * 4);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * part));
#pragma GCC unroll 2
      for (int row = 0; row < ROWS; ++row) {
        // No size is above 127 and no weight below -128, so that two products fit sixteen bits.
        const __m256i pairs = _mm256_maddubs_epi16(sizes[row], _mm256_xor_si256(columns, flips[row]));
        whole[row][part] = _mm256_add_epi32(whole[row][part], _mm256_madd_epi16(pairs, ones));
        // Additions in another order would need more registers than there are.
        asm("" : "+x"(whole[row][part]));
      }
    }
  }
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      sums[row][part] = whole[row][part];
    }
  }
}

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, const float* scales, float* y,
    int64_t y_stride, Ahead ahead) {
  __m256 sums[ROWS][kParts] = {};
  for (int64_t group = 0; group < groups; ++group) {
    Sums<ROWS> whole;
    add_group<ROWS, LINES>(inputs, groups, group, packed, ahead, whole);
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
      const __m256 own = _mm256_set1_ps(input_scales[row * groups + group]);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const __m256 scale = _mm256_mul_ps(own, _mm256_loadu_ps(scales + group * kColumns + 8 * part));
        sums[row][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row][part]), scale, sums[row][part]);
      }
    }
  }
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      _mm256_storeu_ps(y + row * y_stride + 8 * part, sums[row][part]);
    }
  }
}

}  // namespace
}  // namespace speccompile::int8
