// How a weight of eight bits lies in memory, see rounded.h.
#pragma once

#include "ahead.h"
#include "rounded.h"
#include "tile.h"

#include <cstdint>

namespace speccompile::int8 {
namespace {

// Steps of four inputs, which is what one instruction multiplies and adds.
constexpr int64_t kSteps = kGroup / 4;
constexpr int64_t kStepBytes = kColumns * 4;
constexpr int64_t kGroupBytes = kSteps * kStepBytes;

}  // namespace
}  // namespace speccompile::int8
