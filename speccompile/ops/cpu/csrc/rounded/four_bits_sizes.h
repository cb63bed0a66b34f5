// How a weight of four bits lies in memory, see rounded.h.
#pragma once

#include "../base/kernels/ahead.h"
#include "rounded.h"
#include "scale_rows.h"
#include "../base/kernels/tile.h"

#include <cstdint>

namespace speccompile::four_bits {
namespace {

// Steps of four inputs, which is what one instruction multiplies and adds.
constexpr int64_t kSteps = kGroup / 4;
constexpr int64_t kStepBytes = kColumns * 4 / 2;
constexpr int64_t kGroupBytes = kSteps * kStepBytes;

// A group of inputs has parts, each of which can have its own scales: halves, or quarters. What is known of each of them
// lies in one array: of the halves, of the quarters.
constexpr int kHalves = 2, kQuarters = 4;
template <int PARTS>
struct Parts {
  static constexpr int64_t kInputs = kGroup / PARTS;
  static constexpr int64_t kSteps = kInputs / 4;
  static constexpr int64_t kBytes = kSteps * kStepBytes;
  static constexpr int kFirst = PARTS == kHalves ? 0 : kHalves;
};

inline void add_up_quarters(int32_t (&of)[kHalves + kQuarters]) {
  of[0] = of[2] + of[3];
  of[1] = of[4] + of[5];
}

// What four bits stand for, as a struct `Numbers`. Tiles multiply numbers without a sign, of at most kMost, and subtract
// kOffset times the inputs. If kCoded, a number is an entry of kTable; else it is the four bits. If kInQuarters, parts of
// a group may be quarters.
struct Int4Numbers {
  static constexpr int32_t kOffset = 8, kMost = 15;
  static constexpr bool kCoded = false, kInQuarters = false;
};

// E2M1, doubled: 0, 1, 2, 3, 4, 6, 8, 12, and the same below zero. Source: OCP Microscaling Formats 1.0, section 5.3.3.
struct Fp4Numbers {
  static constexpr int32_t kOffset = 12, kMost = 24;
  static constexpr bool kCoded = true, kInQuarters = true;
  alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

template <typename Numbers>
inline int32_t number_of(int32_t bits) {
  if constexpr (Numbers::kCoded) {
    return Numbers::kTable[bits];
  } else {
    return bits;
  }
}

}  // namespace
}  // namespace speccompile::four_bits
