// Keys and values as a cache stores them: in a float type, or in 8 bits. ops/kv_rows.py defines the rows of 8 bits: an
// integer for each feature, then a scale in float16 for each 32 of them. A scale times its integer is exact in float32.
#pragma once

#include "turn.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace speccompile {

// Features with one scale.
constexpr int64_t kScaled = 32;

inline int64_t scales_of(int64_t features) {
  return (features + kScaled - 1) / kScaled;
}

// Elements of a head's row in a cache of T.
template <typename T>
int64_t row_size(int64_t features) {
  return std::is_same_v<T, int8_t> ? features + 2 * scales_of(features) : features;
}

// Calls `run` with a zero of the type that the cache has.
template <typename Run>
void with_cached(Type type, bool in_8_bits, Run run) {
  if (in_8_bits) {
    return run(int8_t{0});
  }
  with_type(type, run);
}

inline const c10::Half* scale_of(const int8_t* row, int64_t features, int64_t feature) {
  return reinterpret_cast<const c10::Half*>(row + features + feature / kScaled * 2);
}

// Of a row with `features`, as many from `feature` on as a vector has.
template <typename T>
auto widened(const T* row, int64_t features, int64_t feature) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return scaled(several(row + feature), scale_of(row, features, feature));
  } else {
    return several(row + feature);
  }
}

// The features [first, first + count) of a row, of which there are `features`. `first` is a multiple of kSide.
template <typename T>
void widen_row(const T* row, int64_t features, int64_t first, int64_t count, float* to) {
  constexpr int64_t kAtOnce = sizeof(widened(row, 0, 0)) / sizeof(float);
  static_assert(kScaled % kAtOnce == 0 && kSide % kAtOnce == 0);
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    put(widened(row, features, first + i), to + i);
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(row[first + i]);
    if constexpr (std::is_same_v<T, int8_t>) {
      to[i] *= static_cast<float>(*scale_of(row, features, first + i));
    }
  }
}

// A square of a cache's rows, from `feature` on.
template <typename T>
struct SquareOf {
  const T* from;
  int64_t stride, features, feature;

  auto vector(int64_t row, int64_t column) const { return widened(from + row * stride, features, feature + column); }
};

// Rounds a row to 8 bits.
inline void round_row(const float* x, int64_t features, int8_t* row) {
  constexpr float kMost = 127.0f;
  for (int64_t first = 0; first < features; first += kScaled) {
    const int64_t count = std::min(kScaled, features - first);
    alignas(64) float group[kScaled] = {};
    std::copy_n(x + first, count, group);
    Vec greatest(0.0f);
    for (int64_t i = 0; i < kScaled; i += kLanes) {
      greatest = at::vec::maximum(greatest, Vec::loadu(group + i).abs());
    }
    const float most = at::vec::vec_reduce_all<float>(
        [](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, greatest);
    const c10::Half scale(most / kMost);
    std::memcpy(row + features + first / kScaled * 2, &scale, sizeof(scale));
    const Vec divisor(static_cast<float>(scale)), zero(0.0f), high(kMost), low(-kMost);
    for (int64_t i = 0; i < kScaled; i += kLanes) {
      Vec quotient = Vec::loadu(group + i) / divisor;
      quotient = Vec::blendv(quotient, zero, quotient != quotient);
      at::vec::clamp(quotient, low, high).round().store(group + i);
    }
    for (int64_t i = 0; i < count; ++i) {
      row[first + i] = static_cast<int8_t>(group[i]);
    }
  }
}

}  // namespace speccompile
