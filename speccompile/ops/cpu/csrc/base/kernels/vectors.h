// Numbers of any type in registers of float32.
#pragma once

#include "tile.h"

namespace speccompile {

// Rounded to T, as float32.
template <typename T>
inline Vec rounded(const Vec& values) {
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    alignas(64) float wide[kLanes];
    alignas(64) T narrow[kLanes];
    values.store(wide);
    at::vec::convert(wide, narrow, kLanes);
    at::vec::convert(narrow, wide, kLanes);
    return Vec::loadu(wide);
  }
}

template <typename T>
inline Vec load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return count == kLanes ? Vec::loadu(from) : Vec::loadu(from, count);
  } else {
    alignas(64) float wide[kLanes] = {};
    at::vec::convert(from, wide, count);
    return Vec::loadu(wide);
  }
}

template <typename T>
inline void store(const Vec& values, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    count == kLanes ? values.store(to) : values.store(to, static_cast<int>(count));
  } else {
    alignas(64) float wide[kLanes];
    values.store(wide);
    at::vec::convert(wide, to, count);
  }
}

// Calls `run(i, count)` for runs of at most as many numbers as a vector has.
template <typename Run>
inline void by_vectors(int64_t size, const Run& run) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    run(i, kLanes);
  }
  if (i < size) {
    run(i, size - i);
  }
}

}  // namespace speccompile
