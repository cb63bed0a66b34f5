// The one inner loop of all products: c[ROWS, VECS * lanes] (+)= a[ROWS, depth] * b[depth, VECS * lanes].
//
// Every output is one chain of multiply-adds in ascending depth, whatever the tile it is computed in: a row's result has
// the same bits alone, among neighbours, and however the rows are cut into tiles.
#pragma once

#include "ahead.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace speccompile {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
// The score of what is forbidden or hidden.
constexpr float kForbidden = -std::numeric_limits<float>::infinity();
// Columns of a packed weight's block, and of a tile: two AVX-512 registers, four of AVX2.
constexpr int64_t kColumns = 32;
constexpr int kVecs = kColumns / kLanes;
// Accumulators have to stay in registers, of which there are 32 with AVX-512 and otherwise 16.
constexpr int kWideRows = kVecs == 2 ? 12 : 3;
constexpr int kNarrowVecs = 2;
constexpr int kNarrowRows = kVecs == 2 ? 12 : 6;

template <typename T>
struct Loader;

template <>
struct Loader<float> {
  template <int VECS>
  static inline void load(const float* from, Vec (&to)[VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      to[v] = Vec::loadu(from + v * kLanes);
    }
  }
};

template <typename Half>
struct HalfLoader {
  template <int VECS>
  static inline void load(const Half* from, Vec (&to)[VECS]) {
    static_assert(VECS % 2 == 0);
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v += 2) {
      auto [low, high] = at::vec::convert_to_float<Half>(at::vec::Vectorized<Half>::loadu(from + v * kLanes));
      to[v] = low;
      to[v + 1] = high;
    }
  }
};

template <>
struct Loader<c10::BFloat16> : HalfLoader<c10::BFloat16> {};
template <>
struct Loader<c10::Half> : HalfLoader<c10::Half> {};

template <typename T, int ROWS, int VECS, int LINES>
inline void tile(
    const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride, bool add,
    Ahead ahead) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      sums[row][v] = Vec(0.0f);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec columns[VECS];
    Loader<T>::template load<VECS>(b + k * b_stride, columns);
    ahead.fetch<LINES>(k);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const Vec factor(a[row * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) {
        sums[row][v] = at::vec::fmadd(factor, columns[v], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      float* const to = c + row * c_stride + v * kLanes;
      (add ? Vec::loadu(to) + sums[row][v] : sums[row][v]).store(to);
    }
  }
}

// Cache lines that a step fetches. A single pass fetches all; of several each has a share, one line at most. With AVX-512
// both are the same tiles, which are not compiled twice for that: a line is fetched again there.
template <typename T>
constexpr int kWideLines = kColumns * sizeof(T) / kCacheLine;
template <typename T>
constexpr int kNarrowLines = kVecs == kNarrowVecs ? kWideLines<T> : 1;

template <typename T, int ROWS, int VECS, int LINES>
inline void tile_of(
    int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, bool add, Ahead ahead) {
  if (rows == ROWS) {
    ahead.with_lines<LINES>([&](auto lines) {
      tile<T, ROWS, VECS, decltype(lines)::value>(a, a_stride, b, b_stride, depth, c, c_stride, add, ahead);
    });
  } else if constexpr (ROWS > 1) {
    tile_of<T, ROWS - 1, VECS, LINES>(rows, a, a_stride, b, b_stride, depth, c, c_stride, add, ahead);
  }
}

// c[rows, 32] (+)= a[rows, depth] * b[depth, 32], any number of rows. What is multiplied next, of the same size, may be
// named: it is fetched from memory meanwhile.
template <typename T>
inline void product(
    int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, bool add, const T* next = nullptr) {
  constexpr int64_t kStep = kColumns * sizeof(T);
  if (rows <= kWideRows) {
    tile_of<T, kWideRows, kVecs, kWideLines<T>>(
        rows, a, a_stride, b, b_stride, depth, c, c_stride, add, Ahead::share(rows, next, depth, kStep, 0, 1));
    return;
  }
  // Tiles of about one size: a small one would wait for its sums more than it computes.
  const int64_t tiles = (rows + kNarrowRows - 1) / kNarrowRows, each = (rows + tiles - 1) / tiles;
  const int64_t passes = tiles * (kVecs / kNarrowVecs);
  int64_t pass = 0;
  for (int64_t column = 0; column < kColumns; column += kNarrowVecs * kLanes) {
    for (int64_t row = 0; row < rows; row += each, ++pass) {
      tile_of<T, kNarrowRows, kNarrowVecs, kNarrowLines<T>>(
          std::min(each, rows - row), a + row * a_stride, a_stride, b + column, b_stride, depth,
          c + row * c_stride + column, c_stride, add, Ahead::share(rows, next, depth, kStep, pass, passes));
    }
  }
}

}  // namespace speccompile
