// y = x * w^T + b for tokens with the same expert, over its weights as the model has them. A model has many more weights
// of experts than others: a second, packed copy would be most of its memory. Weights are read from memory once, for all
// tokens. The order of an output's sum depends on nothing but the depth.
#include "expert_linear.h"

#include "../base/kernels/tile.h"

#include <type_traits>
#include <vector>

namespace speccompile {
namespace {

// --- weights [features, depth]: an output is the sum of lanes, each over its own inputs ---------------------------------

// Outputs whose weights are read together, and tokens that read them. Their sums have to stay in registers.
constexpr int kDots = 4;
constexpr int kDotTokens = kVecs == 2 ? 4 : 2;
// So much of the depth of these weights stays in the first-level cache while all tokens pass.
constexpr int64_t kDotDepth = 2048;

// sums[TOKENS, OUTPUTS] (+)= x[TOKENS, depth] * weights[OUTPUTS, depth]^T. The same of `next` is fetched from memory.
template <typename T, int OUTPUTS, int TOKENS>
void dots(
    const T* weights, int64_t stride, const float* x, int64_t x_stride, int64_t depth, float* sums, int64_t sums_stride,
    bool add, const T* next) {
  constexpr int VECS = std::is_same_v<T, float> ? 1 : 2;
  constexpr int64_t kStep = VECS * kLanes;
  Vec lanes[TOKENS][OUTPUTS];
#pragma GCC unroll 4
  for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 4
    for (int i = 0; i < OUTPUTS; ++i) {
      lanes[token][i] = Vec(0.0f);
    }
  }
  const auto multiply = [&](const T* from, int64_t from_stride, const float* with, int64_t with_stride) {
    Vec loaded[OUTPUTS][VECS];
#pragma GCC unroll 4
    for (int i = 0; i < OUTPUTS; ++i) {
      Loader<T>::template load<VECS>(from + i * from_stride, loaded[i]);
    }
#pragma GCC unroll 4
    for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 2
      for (int v = 0; v < VECS; ++v) {
        const Vec input = Vec::loadu(with + token * with_stride + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < OUTPUTS; ++i) {
          lanes[token][i] = at::vec::fmadd(input, loaded[i][v], lanes[token][i]);
        }
      }
    }
  };
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    if (next != nullptr && k * sizeof(T) % kCacheLine == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < OUTPUTS; ++i) {
        __builtin_prefetch(next + i * stride + k, 0, 2);
      }
    }
    multiply(weights + k, stride, x + k, x_stride);
  }
  if (k < depth) {
    // Zeros after the last inputs.
    T rest[OUTPUTS * kStep] = {};
    float inputs[TOKENS * kStep] = {};
    for (int i = 0; i < OUTPUTS; ++i) {
      std::copy(weights + i * stride + k, weights + i * stride + depth, rest + i * kStep);
    }
    for (int token = 0; token < TOKENS; ++token) {
      std::copy(x + token * x_stride + k, x + token * x_stride + depth, inputs + token * kStep);
    }
    multiply(rest, kStep, inputs, kStep);
  }
  for (int token = 0; token < TOKENS; ++token) {
    for (int i = 0; i < OUTPUTS; ++i) {
      const float sum = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, lanes[token][i]);
      float& to = sums[token * sums_stride + i];
      to = add ? to + sum : sum;
    }
  }
}

template <typename T, int OUTPUTS, int TOKENS = kDotTokens>
void dots_of(
    int64_t tokens, const T* weights, int64_t stride, const float* x, int64_t x_stride, int64_t depth, float* sums,
    int64_t sums_stride, bool add, const T* next) {
  if (tokens == TOKENS) {
    dots<T, OUTPUTS, TOKENS>(weights, stride, x, x_stride, depth, sums, sums_stride, add, next);
  } else if constexpr (TOKENS > 1) {
    dots_of<T, OUTPUTS, TOKENS - 1>(tokens, weights, stride, x, x_stride, depth, sums, sums_stride, add, next);
  }
}

template <typename T>
void panel_of_rows(
    const T* weights, int64_t depth, const float* x, int64_t x_stride, int64_t rows, float* sums, int64_t columns,
    int64_t stride) {
  for (int64_t start = 0; start < depth; start += kDotDepth) {
    const int64_t count = std::min(kDotDepth, depth - start);
    for (int64_t column = 0; column < columns;) {
      const int64_t outputs = columns - column >= kDots ? kDots : 1;
      const T* const from = weights + column * depth + start;
      for (int64_t row = 0; row < rows; row += kDotTokens) {
        const int64_t tokens = std::min<int64_t>(kDotTokens, rows - row);
        const T* const next = row == 0 ? from + outputs * depth : nullptr;
        const float* const input = x + row * x_stride + start;
        float* const to = sums + row * stride + column;
        if (outputs == kDots) {
          dots_of<T, kDots>(tokens, from, depth, input, x_stride, count, to, stride, start > 0, next);
        } else {
          dots_of<T, 1>(tokens, from, depth, input, x_stride, count, to, stride, start > 0, next);
        }
      }
      column += outputs;
    }
  }
}

// --- weights [depth, features]: the loop of packed weights, over tiles that lie apart ---------------------------------

// So much of the depth is read at once: rows that are a power of two apart share a few sets of a cache.
constexpr int64_t kExpertDepth = 64;

// packed[depth, 32] of weights [depth, columns].
template <typename T>
void pack_columns(const T* from, int64_t stride, int64_t columns, int64_t depth, float* packed) {
  for (int64_t k = 0; k < depth; ++k) {
    float* const to = packed + k * kColumns;
    if (columns == kColumns) {
      Vec loaded[kVecs];
      Loader<T>::template load<kVecs>(from + k * stride, loaded);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        loaded[v].store(to + v * kLanes);
      }
    } else {
      for (int64_t column = 0; column < kColumns; ++column) {
        to[column] = column < columns ? static_cast<float>(from[k * stride + column]) : 0.0f;
      }
    }
  }
}

// Fetches `count` rows of `bytes` each, `stride` bytes apart.
inline void fetch_rows(const char* from, int64_t stride, int64_t count, int64_t bytes) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t byte = 0; byte < bytes; byte += kCacheLine) {
      __builtin_prefetch(from + row * stride + byte, 0, 2);
    }
  }
}

template <typename T>
void panel_of_columns(
    const T* weights, int64_t depth, int64_t features, const float* x, int64_t x_stride, int64_t rows, float* sums,
    int64_t columns, int64_t stride) {
  alignas(64) float packed[kExpertDepth * kColumns];
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t start = 0; start < depth; start += kExpertDepth) {
    const int64_t count = std::min(kExpertDepth, depth - start), after = std::min(kExpertDepth, depth - start - count);
    const T* const from = weights + start * features;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t column = block * kColumns, there = std::min(kColumns, columns - column);
      const int64_t first = after * block / blocks, last = after * (block + 1) / blocks;
      fetch_rows(
          reinterpret_cast<const char*>(from + (count + first) * features), features * sizeof(T), last - first,
          columns * sizeof(T));
      float* const to = sums + column;
      if (rows <= kMostRows && there == kColumns) {
        product<T>(rows, x + start, x_stride, from + column, features, count, to, stride, start > 0);
      } else {
        pack_columns(from + column, features, there, count, packed);
        product<float>(rows, x + start, x_stride, packed, kColumns, count, to, stride, start > 0);
      }
    }
  }
}

template <typename T>
void panel_of(
    const ExpertWeights& of, int64_t expert, const float* x, const int64_t* pairs, int64_t rows, float* y, int64_t panel) {
  const int64_t depth = of.depth, features = of.features, width = of.panel_columns();
  const int64_t column = panel * width, columns = std::min(width, features - column);
  const int64_t stride = (columns + kColumns - 1) / kColumns * kColumns;
  const T* const weights = static_cast<const T*>(of.weight) + expert * features * depth;
  thread_local std::vector<float> kept;
  kept.resize(std::max<size_t>(kept.size(), rows * stride));
  float* const sums = kept.data();
  if (of.transposed) {
    panel_of_columns(weights + column, depth, features, x, of.input_stride(), rows, sums, columns, stride);
  } else {
    panel_of_rows(weights + column * depth, depth, x, of.input_stride(), rows, sums, columns, stride);
  }
  const T* const bias = of.bias ? static_cast<const T*>(of.bias) + expert * features + column : nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    float* const to = y + pairs[row] * features + column;
    for (int64_t i = 0; i < columns; ++i) {
      to[i] = sums[row * stride + i] + (bias ? static_cast<float>(bias[i]) : 0.0f);
    }
  }
}

}  // namespace

void expert_panel(
    const ExpertWeights& of, int64_t expert, const float* x, const int64_t* pairs, int64_t rows, float* y, int64_t panel) {
  with_type(of.type, [&](auto zero) { panel_of<decltype(zero)>(of, expert, x, pairs, rows, y, panel); });
}

}  // namespace speccompile
