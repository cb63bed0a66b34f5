// Tries of suffix decoding, see suffix.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// As speccompile.ops.suffix_trie has it.
struct Speculation {
  int64_t depth;
  double factor, offset, least;

  int64_t most(int64_t matched, int64_t longest) const;
};

// A trie over tables of the arena: used[2], nodes[kFields][capacity], index[places].
class Trie {
 public:
  static constexpr int64_t kFields = 5, kListed = 8;

  Trie(int32_t* used, int32_t* nodes, int64_t capacity, int32_t* index, int64_t places);

  int64_t tokens() const {
    return used_[0];
  }
  void clear();
  // One more token of the text whose suffixes are active[depth + 1].
  void learn(int32_t* active, int64_t depth, int32_t token);
  // The same of a text that is not learned from.
  void follow(int32_t* active, int64_t depth, int32_t token) const;
  // Writes the drafts and their cumulative probabilities; returns how many there are, and how many are expected to be
  // right.
  int64_t propose(
      const int32_t* active, int64_t longest, const Speculation& speculation, int64_t* drafts, float* scores,
      double& expected) const;
  // Writes the likeliest tokens that followed the matches active[depth + 1], their parents (0 or the token's index plus
  // one) and their cumulative probabilities; returns how many there are.
  int64_t propose_tree(
      const int32_t* active, int64_t depth, int64_t most, int64_t* tokens, int64_t* parents, float* scores) const;

 private:
  int64_t place_of(int32_t parent, int32_t token) const;
  int32_t child_of(int32_t parent, int32_t token);
  void list(int32_t parent, int32_t child);
  template <typename Visit>
  int64_t path(int32_t node, int64_t most, double least, Visit visit) const;

  int32_t *used_, *nodes_, *parent_, *token_, *count_, *best_, *next_, *index_;
  int64_t capacity_, places_;
};

}  // namespace speccompile
