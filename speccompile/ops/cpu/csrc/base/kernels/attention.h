// Attention of a step's rows over their own slots, see attention.cpp.
#pragma once

#include <cstdint>

#include "linear.h"

namespace speccompile {

constexpr int64_t kNone = -1;

// Strides are in elements; the last dimension of all tensors is contiguous.
struct Attention {
  int64_t rows, width, heads, groups, depth, value_depth;
  Type type;
  const void *q, *k, *v;
  int64_t q_row, q_place, q_head, k_slot, k_place, k_head, v_slot, v_place, v_head;
  const int64_t *slots, *positions;  // [rows], [rows, width]
  float scale;
  int64_t window, chunk;  // kNone where there is none.
  float softcap;          // 0 where there is none.
  const float* sinks;     // [heads], or null.
  // [rows, width], or null for chains: of the nodes of trees the parent's index in the row, -1 of node 0, the root, and of
  // other roots, whose position is the same. The key of node i stands at the root's place plus i; its position is the
  // root's plus its depth.
  const int64_t* parents;
  float* out;  // [rows, width, heads, value_depth]
};

// The queries of some places of one slot, in the heads that share one KV head. Places are counted through all rows, so
// that neighbouring rows of one slot are taken together.
struct Queries {
  int64_t group, first, last;
  int64_t first_block, last_block;  // What they see of the keys.
  int64_t first_part;               // In a list of parts, one for each block.
};

// All queries of a step, in pieces of which each is worth a thread's while.
struct Plan {
  Queries* pieces;
  int64_t count, parts;
};

int64_t most_pieces(const Attention& problem);
Plan plan(const Attention& problem, Queries* pieces);

// What one block of keys takes for a piece, in no unit: its queries, and its keys themselves, which are turned over.
int64_t block_cost(const Attention& problem, const Queries& queries);

// Floats that one block leaves for one piece of queries.
int64_t part_size(const Attention& problem);

// A piece over all of its blocks.
void attend(const Attention& problem, const Queries& queries);

// The same in two steps, of which the first can go on in several threads.
void attend_block(const Attention& problem, const Queries& queries, int64_t block, float* part);
void join_blocks(const Attention& problem, const Queries& queries, const float* parts);

}  // namespace speccompile
