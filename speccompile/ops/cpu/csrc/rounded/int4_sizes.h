// How a weight of four bits lies in memory, see rounded.h.
#pragma once

#include "../base/kernels/ahead.h"
#include "rounded.h"
#include "scale_rows.h"
#include "../base/kernels/tile.h"

#include <cstdint>

namespace speccompile::int4 {
namespace {

// What is added to a number with a sign, which makes it one without.
constexpr int32_t kOffset = 8;
// Parts of a group of inputs, each of which can have its own scales, and steps of four inputs in each of these.
constexpr int64_t kParts = 2;
constexpr int64_t kPart = kGroup / kParts;
constexpr int64_t kPartSteps = kPart / 4;
constexpr int64_t kStepBytes = kColumns * 4 / 2;
constexpr int64_t kPartBytes = kPartSteps * kStepBytes;
constexpr int64_t kGroupBytes = kParts * kPartBytes;

}  // namespace
}  // namespace speccompile::int4
