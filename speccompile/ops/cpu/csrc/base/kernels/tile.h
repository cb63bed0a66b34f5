// The one inner loop of all products: c[ROWS, VECS * lanes] (+)= a[ROWS, depth] * b[depth, VECS * lanes].
//
// Every output is one chain of multiply-adds in ascending depth, whatever the tile it is computed in: a row's result has
// the same bits alone, among neighbours, and however the rows are cut into tiles.
#pragma once

#include "ahead.h"
#include "linear.h"

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
// Registers of a tile's columns: two of AVX-512, four of AVX2.
constexpr int kVecs = kColumns / kLanes;
// Rows of a tile. Accumulators have to stay in registers, of which there are 32 with AVX-512 and otherwise 16.
constexpr int kMostRows = kVecs == 2 ? 12 : 3;

// Calls `run` with a zero of that type.
template <typename Run>
void with_type(Type type, Run run) {
  switch (type) {
    case Type::Float:
      return run(0.0f);
    case Type::BFloat16:
      return run(c10::BFloat16(0.0f));
    case Type::Half:
      return run(c10::Half(0.0f));
  }
}

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

// What becomes of the values that stand in c: nothing, the sum is added to them, or it goes on from them as one chain.
enum class Sum { New, Added, Continued };

template <typename T, int ROWS, int VECS, int LINES>
inline void tile(
    const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride, Sum sum,
    Ahead ahead) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      sums[row][v] = sum == Sum::Continued ? Vec::loadu(c + row * c_stride + v * kLanes) : Vec(0.0f);
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
      (sum == Sum::Added ? Vec::loadu(to) + sums[row][v] : sums[row][v]).store(to);
    }
  }
}

template <typename T, int ROWS>
inline void tile_of(
    int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, Sum sum, Ahead ahead) {
  if (rows == ROWS) {
    ahead.with_lines<kColumns * sizeof(T) / kCacheLine>([&](auto lines) {
      tile<T, ROWS, kVecs, decltype(lines)::value>(a, a_stride, b, b_stride, depth, c, c_stride, sum, ahead);
    });
  } else if constexpr (ROWS > 1) {
    tile_of<T, ROWS - 1>(rows, a, a_stride, b, b_stride, depth, c, c_stride, sum, ahead);
  }
}

// c[rows, 32] (+)= a[rows, depth] * b[depth, 32], any number of rows. What is multiplied next, of the same size, may be
// named: it is fetched from memory meanwhile.
template <typename T>
inline void product(
    int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, bool add, const T* next = nullptr) {
  // Tiles of about one size: a small one would wait for its sums more than it computes. Each reads whole lines in order,
  // which the hardware fetches sooner than every second line.
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = rows * pass / passes, end = rows * (pass + 1) / passes;
    tile_of<T, kMostRows>(
        end - row, a + row * a_stride, a_stride, b, b_stride, depth, c + row * c_stride, c_stride,
        add ? Sum::Added : Sum::New, Ahead::share(rows, next, depth, kColumns * sizeof(T), pass, passes));
  }
}

// The same; the lines that `ahead` names are fetched in the first pass.
template <typename T>
inline void product_ahead(
    int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, Sum sum, Ahead ahead = {}) {
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = rows * pass / passes, end = rows * (pass + 1) / passes;
    tile_of<T, kMostRows>(
        end - row, a + row * a_stride, a_stride, b, b_stride, depth, c + row * c_stride, c_stride, sum,
        pass == 0 ? ahead : Ahead());
  }
}

}  // namespace speccompile
