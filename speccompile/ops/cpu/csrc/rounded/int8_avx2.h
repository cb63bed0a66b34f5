// A tile of products of eight bits, by AVX2.
#pragma once

#include "int8_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::int8 {
namespace {

constexpr int kRows = 2;
constexpr int kVectors = kColumns / 8;

// A group of a row. The instruction takes unsigned inputs: a negative one's size, and the weights' bits are turned over
// (`flips` is -1), which makes -w - 1 of w. What is missing then, its size once, is `missing` for all of a part.
struct Inputs {
  uint8_t sizes[kGroup];
  int8_t flips[kGroup];
  int32_t missing[kDivisions];
  int32_t sums[kDivisions];

  void set(const float* values, float factor) {
    const __m256i zeros = _mm256_setzero_si256();
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
      // Of eight numbers each: what is negative, and all.
      alignas(32) int64_t below[4], both[4];
      _mm256_store_si256(reinterpret_cast<__m256i*>(below), _mm256_sad_epu8(_mm256_and_si256(size, flip), zeros));
      _mm256_store_si256(reinterpret_cast<__m256i*>(both), _mm256_sad_epu8(size, zeros));
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t place = kFirstQuarter + i / 16 + half;
        missing[place] = static_cast<int32_t>(below[2 * half] + below[2 * half + 1]);
        sums[place] = static_cast<int32_t>(both[2 * half] + both[2 * half + 1]) - 2 * missing[place];
      }
    }
    add_up_quarters(missing);
    add_up_quarters(sums);
  }
};

template <typename T>
__m256i four_of(const T* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

template <int ROWS>
using Sums = __m256i[ROWS][kVectors];

// A part's products. Not inlined: beside a tile's other sums the compiler would keep these in memory.
template <int ROWS, int LINES>
[[gnu::noinline]] void add_part(
    const Inputs* inputs, int64_t groups, const Part& part, const int8_t* packed, Ahead ahead, int64_t first_step,
    Sums<ROWS>& sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i whole[ROWS][kVectors];
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      whole[row][i] = _mm256_set1_epi32(inputs[row * groups].missing[part.place]);
    }
  }
  for (int64_t step = part.from; step < part.to; ++step) {
    const int8_t* weights = packed + step * kStepBytes;
    ahead.fetch<LINES>(first_step + step);
    __m256i sizes[ROWS], flips[ROWS];
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
      sizes[row] = four_of(inputs[row * groups].sizes + step * 4);
      flips[row] = four_of(inputs[row * groups].flips + step * 4);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * i));
#pragma GCC unroll 2
      for (int row = 0; row < ROWS; ++row) {
        // No size is above 127 and no weight below -128, so that two products fit sixteen bits.
        const __m256i pairs = _mm256_maddubs_epi16(sizes[row], _mm256_xor_si256(columns, flips[row]));
        whole[row][i] = _mm256_add_epi32(whole[row][i], _mm256_madd_epi16(pairs, ones));
        // Additions in another order would need more registers than there are.
        asm("" : "+x"(whole[row][i]));
      }
    }
  }
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sums[row][i] = whole[row][i];
    }
  }
}

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, int64_t parts,
    ScaleRows scales, float* y, int64_t y_stride, Ahead ahead) {
  const Parts of_group(parts / groups);
  __m256 sums[ROWS][kVectors] = {};
  for (int64_t group = 0; group < groups; ++group) {
    __m256 products[ROWS][kVectors] = {};
    for (const Part& part : of_group) {
      Sums<ROWS> whole;
      add_part<ROWS, LINES>(inputs + group, groups, part, packed + group * kGroupBytes, ahead, group * kSteps, whole);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const __m256 scale = scales.eight_scales(8 * i);
#pragma GCC unroll 2
        for (int row = 0; row < ROWS; ++row) {
          products[row][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row][i]), scale, products[row][i]);
        }
      }
      if (scales.minimums()) {
        for (int row = 0; row < ROWS; ++row) {
          const int32_t of_part = inputs[row * groups + group].sums[part.place];
          const __m256 input = _mm256_set1_ps(static_cast<float>(of_part));
          for (int i = 0; i < kVectors; ++i) {
            products[row][i] = _mm256_fnmadd_ps(input, scales.eight_minimums(8 * i), products[row][i]);
          }
        }
      }
      scales.next();
    }
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; ++row) {
      const __m256 own = _mm256_set1_ps(input_scales[row * groups + group]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        sums[row][i] = _mm256_fmadd_ps(products[row][i], own, sums[row][i]);
      }
    }
  }
#pragma GCC unroll 2
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      _mm256_storeu_ps(y + row * y_stride + 8 * i, sums[row][i]);
    }
  }
}

}  // namespace
}  // namespace speccompile::int8
