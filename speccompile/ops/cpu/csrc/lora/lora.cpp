// y += scale * (x * down) * up, for tokens with the same adapter: its matrices are read once for all of them, and as many
// ranks of them as it has. Every sum goes over inputs, and then over ranks, in one order, whatever else a step computes.
#include "lora.h"

#include "../base/kernels/tile.h"

#include <type_traits>

namespace speccompile {
namespace {

constexpr int kRankVecs = kRanks / kLanes;
// Sums of one rank, so that the next multiply-add need not wait for the one before it.
constexpr int kRankChains = 2;
// Tokens that read the weights together. Their sums have to stay in registers.
constexpr int kMostTokens = kRankVecs == 1 ? 8 : 3;

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

// TOKENS inputs, and where their ranks go.
template <typename T, int TOKENS>
void down_tile(const T* weights, int64_t stride, const float* const* x, int64_t depth, float* const* hidden) {
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
  int64_t k = 0;
  for (; k + kRankChains <= depth; k += kRankChains) {
    add(k, std::integral_constant<int, 0>());
    add(k + 1, std::integral_constant<int, 1>());
  }
  if (k < depth) {
    add(k, std::integral_constant<int, 0>());
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
    int64_t count, const T* weights, int64_t stride, const float* const* x, int64_t depth, float* const* hidden) {
  if (count == TOKENS) {
    down_tile<T, TOKENS>(weights, stride, x, depth, hidden);
  } else if constexpr (TOKENS > 1) {
    down_of<T, TOKENS - 1>(count, weights, stride, x, depth, hidden);
  }
}

template <typename T>
void down_of_tokens(const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, const float* x, float* hidden) {
  const T* const weights = static_cast<const T*>(of.down) + tokens.place * of.depth * of.most + rank;
  const float* from[kMostTokens];
  float* to[kMostTokens];
  for (int64_t begin = 0; begin < tokens.count; begin += kMostTokens) {
    const int64_t count = std::min<int64_t>(kMostTokens, tokens.count - begin);
    for (int64_t i = 0; i < count; ++i) {
      from[i] = x + tokens.tokens[begin + i] * of.depth;
      to[i] = hidden + (begin + i) * of.most + rank;
    }
    down_of<T>(count, weights, of.most, from, of.depth, to);
  }
}

template <typename T>
void up_of_tokens(
    const LoraBuffers& of, const LoraTokens& tokens, const float* hidden, float* y, int64_t first, int64_t last) {
  const T* const weights = static_cast<const T*>(of.up) + tokens.place * lora_blocks(of.features) * of.most * kColumns;
  alignas(64) float added[kMostRows * kColumns];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, of.features - column);
    for (int64_t begin = 0; begin < tokens.count; begin += kMostRows) {
      const int64_t count = std::min<int64_t>(kMostRows, tokens.count - begin);
      product<T>(
          count, hidden + begin * of.most, of.most, weights + block * of.most * kColumns, kColumns, tokens.rank, added,
          kColumns, false);
      for (int64_t i = 0; i < count; ++i) {
        float* const to = y + tokens.tokens[begin + i] * of.features + column;
        for (int64_t j = 0; j < columns; ++j) {
          to[j] += tokens.scale * added[i * kColumns + j];
        }
      }
    }
  }
}

template <typename Run>
void with_lora_type(Type type, Run run) {
  switch (type) {
    case Type::Float:
      return run(0.0f);
    case Type::BFloat16:
      return run(c10::BFloat16(0.0f));
    case Type::Half:
      return run(c10::Half(0.0f));
  }
}

}  // namespace

void lora_down(const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, const float* x, float* hidden) {
  with_lora_type(of.type, [&](auto zero) { down_of_tokens<decltype(zero)>(of, tokens, rank, x, hidden); });
}

void lora_up(
    const LoraBuffers& of, const LoraTokens& tokens, const float* hidden, float* y, int64_t first, int64_t last) {
  with_lora_type(of.type, [&](auto zero) { up_of_tokens<decltype(zero)>(of, tokens, hidden, y, first, last); });
}

}  // namespace speccompile
