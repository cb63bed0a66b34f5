// The n-gram match of one text, see ngram.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Writes drafts[drafted]; returns how many of them count: all, or none.
int64_t match_ngram(
    const int64_t* tokens, int64_t length, int64_t longest, int64_t shortest, int64_t* drafts, int64_t drafted);

// The same as a tree of what followed the best matches, speccompile.ops.ngram.tree: writes tokens[most] and
// parents[most]; returns how many there are.
struct NgramTree {
  int64_t longest, shortest, matches;
  double continues;
};
int64_t ngram_tree(
    const int64_t* text, int64_t length, const NgramTree& how, int64_t* tokens, int64_t* parents, int64_t most);

}  // namespace speccompile
