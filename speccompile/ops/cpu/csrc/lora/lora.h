// What low-rank adapters add to a linear, see lora.cpp.
#pragma once

#include <cstdint>

#include "../base/kernels/linear.h"

namespace speccompile {

// Ranks that one pass over an input computes.
constexpr int64_t kRanks = 16;

inline int64_t lora_blocks(int64_t features) {
  return (features + kColumns - 1) / kColumns;
}

// The matrices of all adapters of one linear: down[places, depth, most], up[places, lora_blocks(features), most, 32]. `most`
// is a multiple of kRanks.
struct LoraBuffers {
  Type type;
  const void *down, *up;
  int64_t depth, features, most;
};

// Tokens with the same adapter. `tokens` are their numbers among all tokens of a step.
struct LoraTokens {
  int64_t place, rank;
  float scale;
  const int64_t* tokens;
  int64_t count;
};

// The matrices of the adapter at `place`.
const void* lora_down_at(const LoraBuffers& of, int64_t place);
const void* lora_up_at(const LoraBuffers& of, int64_t place);

// hidden[count, most], columns [rank, rank + kRanks): x[all tokens, depth] * down. The matrix that is read after this one may
// be named: its beginning is fetched from memory meanwhile.
void lora_down(
    const LoraBuffers& of, const LoraTokens& tokens, int64_t rank, Type type, const void* x, float* hidden,
    const void* next);

// Blocks [first, last) of the tokens' y[all tokens, features]: old + scale * hidden[count, most] * up. y has the type of old.
void lora_up(
    const LoraBuffers& of, const LoraTokens& tokens, const float* hidden, Type type, const void* old, void* y,
    int64_t first, int64_t last, const void* next);

}  // namespace speccompile
