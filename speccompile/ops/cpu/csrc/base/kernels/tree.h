// Draft trees of one row, see tree.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace speccompile {

// A tree of several paths of draft tokens, see merged in speccompile/ops/tree.py.
class PathTree {
 public:
  // A path from the root.
  void begin() {
    parent_ = 0;
  }
  // A path that continues after a node of the tree, 0 for the root.
  void go_to(int64_t node) {
    parent_ = node;
  }
  // The node that was added last.
  int64_t here() const {
    return parent_;
  }
  void add(int64_t token, double chance);
  // Writes the likeliest tokens, their parents and, unless it is null, their probabilities; returns how many there are.
  int64_t finish(int64_t most, int64_t* tokens, int64_t* parents, float* scores) const;

 private:
  struct Node {
    int64_t token, parent;
    double chance;
  };
  std::vector<Node> nodes_;
  int64_t parent_ = 0;
};

// The shape of a tier. Of a static one, the parent and the rank of each node from 1 on; null of a dynamic one.
struct TreeShape {
  int64_t nodes, depth, branches;
  const int64_t *parents, *ranks;
};

// Where the nodes that fit go: drafts[nodes], parents[1 + nodes], depths[1 + nodes].
struct FittedTree {
  int64_t *drafts, *parents, *depths;
};

// Returns how many of tokens[count] fit; parents are theirs.
int64_t fit_tree(
    const int64_t* tokens, const int64_t* parents, int64_t count, const TreeShape& shape, const FittedTree& out);

// Writes path[1 + depth]; returns how many drafts are on it. There are 1 + nodes targets and parents.
int64_t walk_tree(
    const int64_t* target, const int64_t* drafts, const int64_t* parents, int64_t nodes, int64_t depth, int64_t* path);

}  // namespace speccompile
