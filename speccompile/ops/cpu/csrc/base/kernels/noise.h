// Noise that follows from integers alone: speccompile/ops/noise.py. The integers are the same; Gumbels agree to a few ulp.
#pragma once

#include "tile.h"

#include <algorithm>
#include <cstdint>

namespace speccompile {

// Ids that noise is made for at once.
constexpr int64_t kChunk = 64;
constexpr int kChunkVecs = kChunk / kLanes;

inline uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352D;
  x = (x ^ (x >> 15)) * 0x846CA68B;
  return x ^ (x >> 16);
}

// Uniforms in (0, 1) of kChunk ids from `first` on.
inline void uniforms(uint64_t key, int64_t first, float (&to)[kChunk]) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const uint32_t from = static_cast<uint32_t>(first);
  for (uint32_t i = 0; i < kChunk; ++i) {
    const uint32_t bits = mix32(mix32(((from + i) * 0x9E3779B9u) ^ low) + high);
    const float exact = static_cast<float>(static_cast<int32_t>(bits >> 1));
    to[i] = std::min((exact + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
  }
}

inline Vec gumbel_of(const Vec& uniform) {
  return uniform.neg().log1p().neg().log().neg();
}

}  // namespace speccompile
