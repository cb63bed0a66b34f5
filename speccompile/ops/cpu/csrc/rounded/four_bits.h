// The form of weights of four bits, for what these stand for, see four_bits_sizes.h.
#pragma once

#include "rounded_blocks.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
#include "four_bits_avx512.h"
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include "four_bits_avx2.h"
#else
#include "four_bits_plain.h"
#endif

namespace speccompile {
namespace {

template <typename Numbers>
struct FourBits {
  using Inputs = four_bits::Inputs<Numbers>;
  using Number = uint8_t;
  static constexpr int kRows = four_bits::kRows;
  static constexpr int64_t kSteps = four_bits::kSteps, kStepBytes = four_bits::kStepBytes;
  static constexpr bool kMinimums = !Numbers::kCoded;

  static int64_t parts(int64_t groups, int64_t scale_rows) {
    const bool quarters = Numbers::kInQuarters && scale_rows == groups * four_bits::kQuarters;
    return groups * (quarters ? four_bits::kQuarters : four_bits::kHalves);
  }

  template <int ROWS, int LINES>
  static void tile(
      const Inputs* inputs, const float* input_scales, int64_t groups, const uint8_t* packed, int64_t parts,
      const ScaleRows& scales, float* y, int64_t y_stride, Ahead ahead) {
    if constexpr (Numbers::kInQuarters) {
      if (parts == groups * four_bits::kQuarters) {
        four_bits::tile<Numbers, four_bits::kQuarters, ROWS, LINES>(
            inputs, input_scales, groups, packed, scales, y, y_stride, ahead);
        return;
      }
    }
    four_bits::tile<Numbers, four_bits::kHalves, ROWS, LINES>(
        inputs, input_scales, groups, packed, scales, y, y_stride, ahead);
  }

  static int32_t number(int64_t k, int64_t column, const uint8_t* packed, bool minimums) {
    const int64_t place = column % (kColumns / 2);
    const int32_t both = packed[k / 4 * kStepBytes + place * 4 + k % 4];
    return four_bits::number_of<Numbers>(place == column ? both & 15 : both >> 4) - (minimums ? 0 : Numbers::kOffset);
  }
};

}  // namespace
}  // namespace speccompile
