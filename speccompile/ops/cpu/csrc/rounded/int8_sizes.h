// How a weight of eight bits lies in memory, see rounded.h.
#pragma once

#include "../base/kernels/ahead.h"
#include "rounded.h"
#include "scale_rows.h"
#include "../base/kernels/tile.h"

#include <cstdint>

namespace speccompile::int8 {
namespace {

// Steps of four inputs, which is what one instruction multiplies and adds.
constexpr int64_t kSteps = kGroup / 4;
constexpr int64_t kStepBytes = kColumns * 4;
constexpr int64_t kGroupBytes = kSteps * kStepBytes;

// A group is one part, or two, or four. What is known of each of them lies in one array: of the whole group, of its
// halves, of its quarters.
constexpr int kQuarters = 4;
constexpr int kDivisions = 1 + 2 + kQuarters;

// Steps [from, to) of a group, and its place in such an array.
struct Part {
  int64_t from, to, place;
  bool first, last;
};

class Parts {
 public:
  explicit Parts(int64_t count) : count_(count) {
    for (int64_t part = 0; part < count; ++part) {
      const int64_t steps = kSteps / count, from = part * steps;
      parts_[part] = {from, from + steps, count - 1 + part, part == 0, part == count - 1};
    }
  }

  const Part* begin() const { return parts_; }
  const Part* end() const { return parts_ + count_; }

 private:
  Part parts_[kQuarters];
  int64_t count_;
};

// Where the first quarter stands in them.
constexpr int kFirstQuarter = 3;

inline void add_up_quarters(int32_t (&of)[kDivisions]) {
  of[1] = of[3] + of[4];
  of[2] = of[5] + of[6];
  of[0] = of[1] + of[2];
}

}  // namespace
}  // namespace speccompile::int8
