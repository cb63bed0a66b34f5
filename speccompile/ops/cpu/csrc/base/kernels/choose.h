// The token of a place, and the greatest scores of one, see choose.cpp and greatest.cpp.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "linear.h"

namespace speccompile {

// Ids are counted in float32.
constexpr int64_t kMostTokens = 1 << 24;

// What was found among some ids of a place. Of equal scores the first one counts.
struct Best {
  float top = -std::numeric_limits<float>::infinity();
  float second = -std::numeric_limits<float>::infinity();
  int64_t token = 0;
  bool is_nan = false;  // One of them is.
};

// Of the scores of ids [first, last); with a key, of the scores and the noise that follows from it. That of id 0 is the
// noise of token `token`: the scores may be a part of a vocabulary.
Best best_of(Type type, const void* scores, int64_t first, int64_t last, std::optional<uint64_t> key, int64_t token);

// `later` is of ids after those of `best`.
Best join(const Best& best, const Best& later);

// Whether another logarithm, of the same accuracy, could make the second one of two noised scores the first.
bool is_close(const Best& best);

// speccompile.ops.noise.TOKENS.
constexpr int64_t kTokenStream = 0;

// speccompile.ops.noise.keys of one place.
uint64_t key_of(int64_t seed, int64_t stream, int64_t position, std::optional<int64_t> start);

// The `count` greatest of scores[vocab] in descending order, a NaN being greater than all.
void greatest_of(const float* scores, int64_t vocab, int64_t count, float* out);

// The softmax of the greatest of scores[vocab].
float greatest_share(const float* scores, int64_t vocab);

// What is below the threshold becomes -inf.
void cut_below(float* scores, int64_t vocab, float threshold);

}  // namespace speccompile
