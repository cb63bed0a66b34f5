// A tile of products of eight bits, by AVX512-VNNI.
#pragma once

#include "int8_sizes.h"
#include "round_avx512.h"
#include "scaled_avx512.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace speccompile::int8 {
namespace {

constexpr int kRows = 8;
// What is added to a weight, which makes it one without a sign.
constexpr int32_t kShift = 128;

// A group of a row. The instruction takes unsigned weights: `kShift` is added to them, and each sum begins at its part's
// offset, which takes the inputs times that off again.
struct Inputs {
  int8_t numbers[kGroup];
  int32_t offsets[kDivisions];

  void set(const float* values, float factor) {
    const __m128i sums = round_group(values, factor, numbers);
    const __m128i shift = _mm_set1_epi32(-kShift);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(offsets + kFirstQuarter), _mm_mullo_epi32(sums, shift));
    add_up_quarters(offsets);
  }
};

// Integer products of steps [from, to) of a group. The loop's sums end with it: where they are read further down, GCC
// would copy all of them in each step.
template <int ROWS, int LINES>
[[gnu::always_inline]] inline void multiply(
    const Inputs* inputs, int64_t groups, int64_t from, int64_t to, int64_t place, const int8_t* packed, Ahead ahead,
    int64_t first_step, __m512i (&whole)[ROWS][2]) {
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(kShift));
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    whole[row][0] = whole[row][1] = _mm512_set1_epi32(inputs[row * groups].offsets[place]);
  }
  int64_t step = from;
#pragma GCC unroll 1
  do {
    const int8_t* weights = packed + step * kStepBytes;
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
  } while (++step < to);
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    asm("" : "+v"(whole[row][0]), "+v"(whole[row][1]));
  }
}

// A part's products. Not inlined: in the loop over steps all of the registers are wanted for these, and the compiler
// would keep the sums of the groups before in some of them.
template <int ROWS, int LINES>
[[gnu::noinline]] void add_part(
    const Inputs* inputs, const float* input_scales, int64_t groups, const Part& part, const int8_t* packed,
    const ScaleRows& scales, Ahead ahead, int64_t first_step, Scaled<ROWS>& scaled) {
  __m512i whole[ROWS][2];
  multiply<ROWS, LINES>(inputs, groups, part.from, part.to, part.place, packed, ahead, first_step, whole);
  // Without it, the offsets are kept until here, for the minimums that there may be.
  asm("" ::: "memory");
  const auto input = [&](int row) {
    return static_cast<float>(inputs[row * groups].offsets[part.place]) * (-1.0f / kShift);
  };
  scaled.add(whole, scales, part.first, part.last, input, input_scales, groups);
}

// The same of a group whose weights have one float32 scale each, which is how this package rounds them.
template <int ROWS, int LINES>
[[gnu::noinline]] void add_group(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, const float* scales,
    Ahead ahead, int64_t first_step, Scaled<ROWS>& scaled) {
  __m512i whole[ROWS][2];
  multiply<ROWS, LINES>(inputs, groups, 0, kSteps, 0, packed, ahead, first_step, whole);
  const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + 16);
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    const __m512 own = _mm512_set1_ps(input_scales[row * groups]);
    auto& sums = scaled.sums[row];
    sums[0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole[row][0]), low), own, sums[0]);
    sums[1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole[row][1]), high), own, sums[1]);
  }
}

template <int ROWS, int LINES>
void tile(
    const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed, int64_t parts,
    ScaleRows scales, float* y, int64_t y_stride, Ahead ahead) {
  const Parts of_group(parts / groups);
  Scaled<ROWS> scaled;
  const float* const singles = parts == groups ? scales.singles() : nullptr;
  for (int64_t group = 0; group < groups; ++group) {
    if (singles != nullptr) {
      add_group<ROWS, LINES>(
          inputs + group, input_scales + group, groups, packed + group * kGroupBytes, singles + group * kColumns, ahead,
          group * kSteps, scaled);
      continue;
    }
    for (const Part& part : of_group) {
      add_part<ROWS, LINES>(
          inputs + group, input_scales + group, groups, part, packed + group * kGroupBytes, scales, ahead,
          group * kSteps, scaled);
      scales.next();
    }
  }
  scaled.store(y, y_stride);
}

}  // namespace
}  // namespace speccompile::int8
