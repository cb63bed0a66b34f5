// y = old + scale * (x * down) * up, for tokens with the same adapter: its matrices are read once for all of them, and as
// many ranks of them as it has. Every sum goes over inputs, and then over ranks, in one order, whatever else a step computes.
//
// A matrix is a few pages long. The hardware fetches ahead inside a page alone, so here each matrix fetches itself, and the
// beginning of the next one.
#include "lora.h"

#include "../base/kernels/tile.h"

#include <type_traits>
#include <vector>

namespace speccompile {
namespace {

constexpr int kRankVecs = kRanks / kLanes;
// Sums of one rank, so that the next multiply-add need not wait for the one before it.
constexpr int kRankChains = 2;
// Tokens that read the first matrix together. Their sums have to stay in registers.
constexpr int kMostTokens = kRankVecs == 1 ? 8 : 3;
// Bytes between what is multiplied and what is fetched.
constexpr int64_t kAhead = 8192;

template <typename T>
inline void load_ranks(const T* from, Vec (&to)[kRankVecs]) {
  if constexpr (std::is_same_v<T, float> || kRankVecs % 2 == 0) {
    Loader<T>::template load<kRankVecs>(from, to);
  } else {
    // Half of a register.
    auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from, kRanks));
    to[0] = low;
  }
}

inline void fetch(const char* line) {
  __builtin_prefetch(line, 0, 3);
}

// TOKENS inputs, and where their ranks go.
template <typename T, int TOKENS>
void down_tile(
    const T* weights, int64_t stride, const float* const* x, int64_t depth, float* const* hidden, const char* next) {
  Vec sums[TOKENS][kRankChains][kRankVecs];
#pragma GCC unroll 8
  for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 2
    for (int chain = 0; chain < kRankChains; ++chain) {
#pragma GCC unroll 4
      for (int v = 0; v < kRankVecs; ++v) {
        sums[token][chain][v] = Vec(0.0f);
      }
    }
  }
  const auto add = [&](int64_t k, auto number) {
    constexpr int chain = decltype(number)::value;
    Vec ranks[kRankVecs];
    load_ranks(weights + k * stride, ranks);
#pragma GCC unroll 8
    for (int token = 0; token < TOKENS; ++token) {
      const Vec factor(x[token][k]);
#pragma GCC unroll 4
      for (int v = 0; v < kRankVecs; ++v) {
        sums[token][chain][v] = at::vec::fmadd(factor, ranks[v], sums[token][chain][v]);
      }
    }
  };
  // Of both chains.
  const int64_t step = kRankChains * stride * static_cast<int64_t>(sizeof(T));
  const int64_t steps = depth / kRankChains, own = std::max<int64_t>(steps - kAhead / step, 0);
  const auto pass = [&](int64_t first, int64_t last, const char* from) {
    for (int64_t i = first; i < last; ++i, from += step) {
      fetch(from);
      add(kRankChains * i, std::integral_constant<int, 0>());
      add(kRankChains * i + 1, std::integral_constant<int, 1>());
    }
  };
  pass(0, own, reinterpret_cast<const char*>(weights) + kAhead);
  pass(own, steps, next);
  if (depth % kRankChains) {
    add(depth - 1, std::integral_constant<int, 0>());
  }
#pragma GCC unroll 8
  for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 4
    for (int v = 0; v < kRankVecs; ++v) {
      (sums[token][0][v] + sums[token][1][v]).store(hidden[token] + v * kLanes);
    }
  }
}

template <typename T, int TOKENS = kMostTokens>
void down_of(
    int64_t count, const T* weights, int64_t stride, const float* const* x, int64_t depth, float* const* hidden,
    const char* next) {
  if (count == TOKENS) {
    down_tile<T, TOKENS>(weights, stride, x, depth, hidden, next);
  } else if constexpr (TOKENS > 1) {
    down_of<T, TOKENS - 1>(count, weights, stride, x, depth, hidden, next);
  }
}

template <typename From>
void convert_to_floats(const From* from, float* to, int64_t count) {
  using Packed = at::vec::Vectorized<From>;
  int64_t i = 0;
  for (; i + Packed::size() <= count; i += Packed::size()) {
    auto [low, high] = at::vec::convert_to_float<From>(Packed::loadu(from + i));
    low.store(to + i);
    high.store(to + i + kLanes);
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

template <typename To>
void convert_from_floats(const float* from, To* to, int64_t count) {
  using Packed = at::vec::Vectorized<To>;
  int64_t i = 0;
  for (; i + Packed::size() <= count; i += Packed::size()) {
    at::vec::convert_from_float<To>(Vec::loadu(from + i), Vec::loadu(from + i + kLanes)).store(to + i);
  }
  for (; i < count; ++i) {
    to[i] = static_cast<To>(from[i]);
  }
}

template <typename T, typename X>
void down_of_tokens(
    const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, const X* x, float* hidden, const void* next) {
  const T* const weights = static_cast<const T*>(lora_down_at(of, tokens.place)) + rank;
  thread_local std::vector<float> converted;
  const float* from[kMostTokens];
  float* to[kMostTokens];
  for (int64_t begin = 0; begin < tokens.count; begin += kMostTokens) {
    const int64_t count = std::min<int64_t>(kMostTokens, tokens.count - begin);
    if constexpr (!std::is_same_v<X, float>) {
      converted.resize(std::max<size_t>(converted.size(), kMostTokens * of.depth));
    }
    for (int64_t i = 0; i < count; ++i) {
      const X* const row = x + tokens.tokens[begin + i] * of.depth;
      if constexpr (std::is_same_v<X, float>) {
        from[i] = row;
      } else {
        from[i] = converted.data() + i * of.depth;
        convert_to_floats(row, converted.data() + i * of.depth, of.depth);
      }
      to[i] = hidden + (begin + i) * of.most + rank;
    }
    down_of<T>(count, weights, of.most, from, of.depth, to, static_cast<const char*>(next));
  }
}

// A block of TOKENS tokens: sums of `rank` products, scaled and added to what is in old, which may be y.
template <typename T, int TOKENS>
void up_tile(
    const T* weights, int64_t rank, float scale, const float* hidden, int64_t stride, const float* const* old,
    float* const* y, const char* next) {
  Vec sums[TOKENS][kVecs];
#pragma GCC unroll 12
  for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sums[token][v] = Vec(0.0f);
    }
  }
  for (int64_t k = 0; k < rank; ++k) {
    Vec columns[kVecs];
    Loader<T>::template load<kVecs>(weights + k * kColumns, columns);
    fetch(next + k * kColumns * sizeof(T));
#pragma GCC unroll 12
    for (int token = 0; token < TOKENS; ++token) {
      const Vec factor(hidden[token * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[token][v] = at::vec::fmadd(factor, columns[v], sums[token][v]);
      }
    }
  }
  const Vec factor(scale);
#pragma GCC unroll 12
  for (int token = 0; token < TOKENS; ++token) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      (Vec::loadu(old[token] + v * kLanes) + factor * sums[token][v]).store(y[token] + v * kLanes);
    }
  }
}

template <typename T, int TOKENS = kMostRows>
void up_of(
    int64_t count, const T* weights, int64_t rank, float scale, const float* hidden, int64_t stride,
    const float* const* old, float* const* y, const char* next) {
  if (count == TOKENS) {
    up_tile<T, TOKENS>(weights, rank, scale, hidden, stride, old, y, next);
  } else if constexpr (TOKENS > 1) {
    up_of<T, TOKENS - 1>(count, weights, rank, scale, hidden, stride, old, y, next);
  }
}

template <typename T, typename Y>
void up_of_tokens(
    const LoraBuffers& of, const LoraTokens& tokens, const float* hidden, const Y* old, Y* y, int64_t first,
    int64_t last, const void* next) {
  const int64_t size = of.most * kColumns, ahead = std::max<int64_t>(kAhead / (size * sizeof(T)), 1);
  const int64_t blocks = lora_blocks(of.features);
  const T* const weights = static_cast<const T*>(lora_up_at(of, tokens.place));
  // Blocks of another type, or with fewer columns than 32, are computed here.
  alignas(64) float whole[kMostRows][kColumns] = {};
  const float* from[kMostRows];
  float* to[kMostRows];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, of.features - column);
    const bool in_place = std::is_same_v<Y, float> && columns == kColumns;
    const char* const later = block + ahead < blocks
                                  ? reinterpret_cast<const char*>(weights + (block + ahead) * size)
                                  : static_cast<const char*>(next) + (block + ahead - blocks) * size * sizeof(T);
    for (int64_t begin = 0; begin < tokens.count; begin += kMostRows) {
      const int64_t count = std::min<int64_t>(kMostRows, tokens.count - begin);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = tokens.tokens[begin + i] * of.features + column;
        if constexpr (std::is_same_v<Y, float>) {
          from[i] = old + at;
          to[i] = y + at;
        } else {
          convert_to_floats(old + at, whole[i], columns);
        }
        if (!in_place) {
          if constexpr (std::is_same_v<Y, float>) {
            std::copy_n(old + at, columns, whole[i]);
          }
          from[i] = to[i] = whole[i];
        }
      }
      up_of<T>(
          count, weights + block * size, tokens.rank, tokens.scale, hidden + begin * of.most, of.most, from, to, later);
      for (int64_t i = 0; !in_place && i < count; ++i) {
        Y* const result = y + tokens.tokens[begin + i] * of.features + column;
        if constexpr (std::is_same_v<Y, float>) {
          std::copy_n(whole[i], columns, result);
        } else {
          convert_from_floats(whole[i], result, columns);
        }
      }
    }
  }
}

const void* matrix(Type type, const void* matrices, int64_t number, int64_t size) {
  return static_cast<const char*>(matrices) + number * size * (type == Type::Float ? 4 : 2);
}

}  // namespace

const void* lora_down_at(const LoraBuffers& of, int64_t place) {
  return matrix(of.type, of.down, place, of.depth * of.most);
}

const void* lora_up_at(const LoraBuffers& of, int64_t place) {
  return matrix(of.type, of.up, place, lora_blocks(of.features) * of.most * kColumns);
}

void lora_down(
    const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, Type type, const void* x, float* hidden,
    const void* next) {
  with_type(of.type, [&](auto weight) {
    with_type(type, [&](auto input) {
      down_of_tokens<decltype(weight)>(of, tokens, rank, static_cast<const decltype(input)*>(x), hidden, next);
    });
  });
}

void lora_up(
    const LoraBuffers& of, const LoraTokens& tokens, const float* hidden, Type type, const void* old, void* y,
    int64_t first, int64_t last, const void* next) {
  with_type(of.type, [&](auto weight) {
    with_type(type, [&](auto output) {
      using Y = decltype(output);
      up_of_tokens<decltype(weight)>(
          of, tokens, hidden, static_cast<const Y*>(old), static_cast<Y*>(y), first, last, next);
    });
  });
}

}  // namespace speccompile
