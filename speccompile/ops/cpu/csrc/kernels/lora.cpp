// y += scale * (x * down) * up, for tokens with the same adapter: its matrices are read once for all of them, and as many
// ranks of them as it has. Every sum goes over inputs, and then over ranks, in one order, whatever else a step computes.
#include "lora.h"

#include "tile.h"

#include <type_traits>

namespace speccompile {
namespace {

constexpr int kRankVecs = kRanks / kLanes;
// Sums of one rank, so that the next multiply-add need not wait for the one before it.
constexpr int64_t kRankChains = 4;

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

template <typename T>
void down_of_token(const T* weights, int64_t stride, const float* x, int64_t depth, float* hidden) {
  Vec sums[kRankChains][kRankVecs];
#pragma GCC unroll 4
  for (int64_t chain = 0; chain < kRankChains; ++chain) {
#pragma GCC unroll 4
    for (int v = 0; v < kRankVecs; ++v) {
      sums[chain][v] = Vec(0.0f);
    }
  }
  const auto add = [&](int64_t k, int64_t chain) {
    Vec ranks[kRankVecs];
    load_ranks(weights + k * stride, ranks);
    const Vec factor(x[k]);
#pragma GCC unroll 4
    for (int v = 0; v < kRankVecs; ++v) {
      sums[chain][v] = at::vec::fmadd(factor, ranks[v], sums[chain][v]);
    }
  };
  int64_t k = 0;
  for (; k + kRankChains <= depth; k += kRankChains) {
#pragma GCC unroll 4
    for (int64_t chain = 0; chain < kRankChains; ++chain) {
      add(k + chain, chain);
    }
  }
  for (; k < depth; ++k) {
    add(k, 0);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kRankVecs; ++v) {
    ((sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v])).store(hidden + v * kLanes);
  }
}

template <typename T>
void down_of_tokens(const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, const float* x, float* hidden) {
  const T* const weights = static_cast<const T*>(of.down) + tokens.place * of.depth * of.most + rank;
  for (int64_t i = 0; i < tokens.count; ++i) {
    down_of_token(weights, of.most, x + tokens.tokens[i] * of.depth, of.depth, hidden + i * of.most + rank);
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
