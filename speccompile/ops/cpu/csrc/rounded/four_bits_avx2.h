// A tile of products of four bits by eight, by AVX2.
#pragma once

#include "four_bits_sizes.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::four_bits {
namespace {

constexpr int kRows = 4;

// A group of a row. Weights have no sign: where one was taken off by `kOffset`, `offsets` are added to a part's sum.
template <typename Numbers>
struct Inputs {
  int8_t numbers[kGroup];
  int32_t offsets[kHalves + kQuarters];

  void set(const float* values, float factor) {
    for (int64_t i = 0; i < kGroup; i += 32) {
      const auto eight = [&](int64_t at) {
        return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + i + at), _mm256_set1_ps(factor)));
      };
      const __m256i first = _mm256_packs_epi32(eight(0), eight(8)), second = _mm256_packs_epi32(eight(16), eight(24));
      // Packs go on in each half of a register.
      const __m256i rounded = _mm256_permutevar8x32_epi32(
          _mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + i), rounded);
    }
    for (int64_t part = 0; part < kQuarters; ++part) {
      int32_t sum = 0;
      for (int64_t i = 0; i < Parts<kQuarters>::kInputs; ++i) {
        sum += numbers[part * Parts<kQuarters>::kInputs + i];
      }
      offsets[kHalves + part] = -Numbers::kOffset * sum;
    }
    add_up_quarters(offsets);
  }
};

// Of half of the columns: 0 to 7 and 16 to 23, or 8 to 15 and 24 to 31.
template <int ROWS>
using Sums = __m256[ROWS][2];

template <typename Numbers>
[[gnu::always_inline]] inline __m256i numbers_of(__m256i bits) {
  if constexpr (Numbers::kCoded) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(Numbers::kTable));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bits);
  } else {
    return bits;
  }
}

// A part's products. Not inlined: beside a tile's other sums the compiler would keep these in memory.
template <typename Numbers, int PARTS, int ROWS, int LINES>
[[gnu::noinline]] void add_part(
    const Inputs<Numbers>* inputs, int64_t groups, int64_t part, const uint8_t* packed, const ScaleRows& scales,
    int64_t column, Ahead ahead, int64_t first_step, Sums<ROWS>& products) {
  using Part = Parts<PARTS>;
  const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const int32_t signs = scales.minimums() ? 0 : 1;
  // Steps whose products fit sixteen bits: each adds two of at most kMost * 127.
  constexpr int64_t kRun = Numbers::kMost > 15 ? 4 : Part::kSteps;
  static_assert(kRun * 2 * Numbers::kMost * 127 < 1 << 15);
  __m256i whole[ROWS][2], wide[ROWS][2];
  for (int64_t run = 0; run < Part::kSteps; run += kRun) {
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      whole[row][0] = whole[row][1] = _mm256_setzero_si256();
    }
    for (int64_t step = run; step < run + kRun; ++step) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + step * kStepBytes));
      const __m256i low = numbers_of<Numbers>(_mm256_and_si256(both, low_half));
      const __m256i high = numbers_of<Numbers>(_mm256_and_si256(_mm256_srli_epi16(both, 4), low_half));
      ahead.fetch<LINES>(first_step + step);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        int32_t four;
        std::memcpy(&four, inputs[row * groups].numbers + part * Part::kInputs + step * 4, 4);
        const __m256i own = _mm256_set1_epi32(four);
        whole[row][0] = _mm256_add_epi16(whole[row][0], _mm256_maddubs_epi16(low, own));
        whole[row][1] = _mm256_add_epi16(whole[row][1], _mm256_maddubs_epi16(high, own));
        // Additions in another order would need more registers than there are.
        asm("" : "+x"(whole[row][0]), "+x"(whole[row][1]));
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m256i sum = _mm256_madd_epi16(whole[row][i], ones);
        wide[row][i] = run == 0 ? sum : _mm256_add_epi32(wide[row][i], sum);
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256 scale = scales.eight_scales(column + 16 * i);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      const __m256i offset = _mm256_set1_epi32(signs * inputs[row * groups].offsets[Part::kFirst + part]);
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(wide[row][i], offset));
      products[row][i] = _mm256_fmadd_ps(sum, scale, products[row][i]);
    }
  }
  if (scales.minimums()) {
    for (int row = 0; row < ROWS; ++row) {
      const float offset = static_cast<float>(inputs[row * groups].offsets[Part::kFirst + part]);
      const __m256 input = _mm256_set1_ps(offset * (-1.0f / Numbers::kOffset));
      for (int i = 0; i < 2; ++i) {
        products[row][i] = _mm256_fnmadd_ps(input, scales.eight_minimums(column + 16 * i), products[row][i]);
      }
    }
  }
}

template <typename Numbers, int PARTS, int ROWS, int LINES>
void tile(
    const Inputs<Numbers>* inputs, const float* input_scales, int64_t groups, const uint8_t* packed,
    ScaleRows scales, float* y, int64_t y_stride, Ahead ahead) {
  // What follows is fetched once.
  constexpr int kNone = 0;
  Sums<ROWS> sums[2] = {};
  for (int64_t group = 0; group < groups; ++group) {
    Sums<ROWS> products[2] = {};
    for (int64_t part = 0; part < PARTS; ++part, scales.next()) {
      const uint8_t* const weights = packed + group * kGroupBytes + part * Parts<PARTS>::kBytes;
      const int64_t step = (group * PARTS + part) * Parts<PARTS>::kSteps;
      add_part<Numbers, PARTS, ROWS, LINES>(inputs + group, groups, part, weights, scales, 0, ahead, step, products[0]);
      add_part<Numbers, PARTS, ROWS, kNone>(
          inputs + group, groups, part, weights + 32, scales, 8, ahead, step, products[1]);
    }
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        const __m256 own = _mm256_set1_ps(input_scales[row * groups + group]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          sums[half][row][i] = _mm256_fmadd_ps(products[half][row][i], own, sums[half][row][i]);
        }
      }
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 2; ++i) {
        _mm256_storeu_ps(y + row * y_stride + half * 8 + i * 16, sums[half][row][i]);
      }
    }
  }
}

}  // namespace
}  // namespace speccompile::four_bits
