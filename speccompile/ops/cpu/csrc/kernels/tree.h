// Draft trees of one row, see tree.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

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
