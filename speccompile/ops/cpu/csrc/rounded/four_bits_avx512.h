// A tile of products of four bits by eight, by AVX512-VNNI.
#pragma once

#include "four_bits_sizes.h"
#include "round_avx512.h"
#include "scaled_avx512.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::four_bits {
namespace {

// Few enough that all sums of a tile stay in registers: those of a part, of its group's parts before it, and of groups.
constexpr int kRows = 4;

// A group of a row. Weights have no sign: where one was taken off by `kOffset`, a part's sum begins at its offset.
template <typename Numbers>
struct Inputs {
  int8_t numbers[kGroup];
  int32_t offsets[kHalves + kQuarters];

  void set(const float* values, float factor) {
    const __m128i sums = round_group(values, factor, numbers);
    const __m128i offset = _mm_set1_epi32(-Numbers::kOffset);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(offsets + kHalves), _mm_mullo_epi32(sums, offset));
    add_up_quarters(offsets);
  }
};

template <typename Numbers>
[[gnu::always_inline]] inline __m512i numbers_of(__m512i bits) {
  if constexpr (Numbers::kCoded) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(Numbers::kTable));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bits);
  } else {
    return bits;
  }
}

// A part's products.
template <typename Numbers, int PARTS, int ROWS, int LINES>
[[gnu::always_inline]] inline void add_part(
    const Inputs<Numbers>* inputs, const float* input_scales, int64_t groups, int64_t part, const uint8_t* packed,
    const ScaleRows& scales, Ahead ahead, int64_t first_step, Scaled<ROWS>& scaled) {
  using Part = Parts<PARTS>;
  const __m512i low_half = _mm512_set1_epi8(15);
  __m512i whole[ROWS][2];
  if (scales.minimums()) {
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      whole[row][0] = whole[row][1] = _mm512_setzero_si512();
    }
  } else {
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      whole[row][0] = whole[row][1] = _mm512_set1_epi32(inputs[row * groups].offsets[Part::kFirst + part]);
    }
  }
#pragma GCC unroll 8
  for (int64_t step = 0; step < Part::kSteps; ++step) {
    const __m512i both = _mm512_loadu_si512(packed + step * kStepBytes);
    const __m512i low = numbers_of<Numbers>(_mm512_and_si512(both, low_half));
    const __m512i high = numbers_of<Numbers>(_mm512_and_si512(_mm512_srli_epi16(both, 4), low_half));
    ahead.fetch<LINES>(first_step + step);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      int32_t four;
      std::memcpy(&four, inputs[row * groups].numbers + part * Part::kInputs + step * 4, 4);
      const __m512i own = _mm512_set1_epi32(four);
      whole[row][0] = _mm512_dpbusd_epi32(whole[row][0], low, own);
      whole[row][1] = _mm512_dpbusd_epi32(whole[row][1], high, own);
    }
  }
  const auto input = [&](int row) {
    return static_cast<float>(inputs[row * groups].offsets[Part::kFirst + part]) * (-1.0f / Numbers::kOffset);
  };
  scaled.add(whole, scales, part == 0, part == PARTS - 1, input, input_scales, groups);
}

template <typename Numbers, int PARTS, int ROWS, int LINES>
void tile(
    const Inputs<Numbers>* inputs, const float* input_scales, int64_t groups, const uint8_t* packed,
    ScaleRows scales, float* y, int64_t y_stride, Ahead ahead) {
  Scaled<ROWS> scaled;
  for (int64_t group = 0; group < groups; ++group) {
#pragma GCC unroll 4
    for (int64_t part = 0; part < PARTS; ++part, scales.next()) {
      const uint8_t* const of_part = packed + group * kGroupBytes + part * Parts<PARTS>::kBytes;
      const int64_t first_step = (group * PARTS + part) * Parts<PARTS>::kSteps;
      add_part<Numbers, PARTS, ROWS, LINES>(
          inputs + group, input_scales + group, groups, part, of_part, scales, ahead, first_step, scaled);
    }
  }
  scaled.store(y, y_stride);
}

}  // namespace
}  // namespace speccompile::four_bits
