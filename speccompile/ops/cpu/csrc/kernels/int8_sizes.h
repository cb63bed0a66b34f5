// How a weight of eight bits lies in memory, see int8.h.
#pragma once

#include "ahead.h"
#include "int8.h"
#include "tile.h"

#include <cstdint>

namespace speccompile {
namespace {

// Steps of four inputs, which is what one instruction multiplies and adds.
constexpr int64_t kSteps = kGroup / 4;
constexpr int64_t kGroupBytes = kSteps * kColumns * 4;

}  // namespace
}  // namespace speccompile
