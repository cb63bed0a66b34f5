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

inline float scale_of(const int8_t* row, int64_t features, int64_t feature) {
  c10::Half scale;
  std::memcpy(&scale, row + features + feature / kScaled * 2, sizeof(scale));
  return static_cast<float>(scale);
}

// A square of a cache's rows, from `feature` on.
template <typename T>
struct SquareOf {
  Square<T> rows;

  SquareOf(const T* from, int64_t stride, int64_t, int64_t feature) : rows{from + feature, stride} {}

  auto vector(int64_t row, int64_t column) const { return rows.vector(row, column); }
};

template <>
struct SquareOf<int8_t> {
  const int8_t* from;
  int64_t stride, features, feature;

  SquareOf(const int8_t* from, int64_t stride, int64_t features, int64_t feature)
      : from(from), stride(stride), features(features), feature(feature) {}

  auto vector(int64_t row, int64_t column) const {
    const int8_t* own = from + row * stride;
    return scaled(several(own + feature + column), scale_of(own, features, feature));
  }
};

// The features [first, first + count) of a row, of which there are `features`.
template <typename T>
void widen_row(const T* row, int64_t features, int64_t first, int64_t count, float* to) {
  if constexpr (std::is_same_v<T, int8_t>) {
    for (int64_t i = 0; i < count;) {
      const int64_t feature = first + i, end = std::min(count, i + kScaled - feature % kScaled);
      const float scale = scale_of(row, features, feature);
      for (; i < end; ++i) {
        to[i] = static_cast<float>(row[first + i]) * scale;
      }
    }
  } else {
    std::copy_n(row + first, count, to);
  }
}

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
