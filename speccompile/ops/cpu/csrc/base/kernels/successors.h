// Tables of successors of tokens and of pairs, see successors.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// As speccompile/ops/successors.py has them.
struct Successors {
  int32_t* tokens;
  float* logprobs;
  int64_t* keys;
  int64_t vocab, pairs, width;

  int64_t place_of(int64_t first, int64_t second) const;
  // Writes the likeliest tokens after `token` to its row, and to the row of the pair `first`, `token` unless `first` is
  // -1. `fills`: only to rows that are empty. An id outside of the vocabulary writes nothing.
  void store(int64_t first, int64_t token, const int64_t* best, const float* best_logprobs, bool fills) const;
  // The row that drafts follow.
  int64_t row_of(int64_t first, int64_t token) const;
};

// Where a row's drafts go, `count` of each.
struct Followed {
  int64_t *drafts, *parents;
  float* logprobs;
  int64_t count;
};

// Writes the drafts after the pair; returns how many there are.
int64_t follow(
    const Successors& table, int64_t first, int64_t token, int64_t branches, float least, const Followed& to);

}  // namespace speccompile
