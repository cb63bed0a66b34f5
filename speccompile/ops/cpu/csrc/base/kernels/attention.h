// Attention of a step's rows over their own slots, see attention.cpp.
#pragma once

#include <cstdint>

#include "linear.h"

namespace speccompile {

constexpr int64_t kNone = -1;
// Places of a block of keys, whose softmax is computed apart.
constexpr int64_t kBlock = 128;

// Strides are in elements; the last dimension of all tensors is contiguous. Of a pool of pages, `slot` is the stride of
// pages.
struct Cache {
  void* from;
  int64_t slot, place, head;
};

// Where the pages of slots are in a pool, [slots, count]. Each has `size` places, a multiple of kBlock.
struct Pages {
  const int64_t* table;  // Null where each slot has one piece of the cache.
  int64_t count, size;
};

// [rows, width, heads, features]
struct Heads {
  const void* from;
  int64_t row, place, head;
};

// What a step writes into the cache before it attends. Queries and keys are rotated on their way: the first `features` of
// each, by cosines and sines of their place, [rows, width, features].
struct Rotary {
  Heads k, v, cos, sin;
  int64_t features;
};

struct Attention {
  int64_t rows, width, heads, groups, depth, value_depth;
  int64_t cache_slots, cache_places;  // A slot's places, in all of its pages.
  int64_t cache_pages;
  Type type, cache_type;  // Of queries and results, and of what the cache has,
  bool in_8_bits;         // unless that is rows of 8 bits, see cached_rows.h.
  Heads q;
  Cache k, v;
  Pages pages;
  const int64_t *slots, *positions;  // [rows], [rows, width]
  float scale;
  int64_t window, chunk;  // kNone where there is none.
  float softcap;          // 0 where there is none.
  Type sinks_type;
  const void* sinks;  // [heads], or null.
  // [rows, width], or null for chains: of the nodes of trees the parent's index in the row, -1 of node 0, the root, and of
  // other roots, whose position is the same. The key of node i stands at the root's place plus i; its position is the
  // root's plus its depth.
  const int64_t* parents;
  void* out;  // [rows, width, heads, value_depth]
  bool rotates;
  Rotary rotary;
};

// The one function that knows where a block of a slot lies.
template <typename T>
T* block_of(const Cache& cache, const Pages& pages, int64_t slot, int64_t block) {
  T* const from = static_cast<T*>(cache.from);
  const int64_t place = block * kBlock;
  if (pages.table == nullptr) {
    return from + slot * cache.slot + place * cache.place;
  }
  const int64_t page = pages.table[slot * pages.count + place / pages.size];
  return from + page * cache.slot + place % pages.size * cache.place;
}

template <typename T>
T* place_of(const Cache& cache, const Pages& pages, int64_t slot, int64_t place) {
  return block_of<T>(cache, pages, slot, place / kBlock) + place % kBlock * cache.place;
}

// The queries of some places of one slot, in the heads that share one KV head. Places are counted through all rows, so
// that neighbouring rows of one slot are taken together.
struct Queries {
  int64_t group, first, last;
  int64_t first_block, last_block;  // What they see of the keys,
  int64_t last_place;               // and where that ends.
  int64_t first_part;               // In a list of parts, one for each block.
};

// A block of keys for pieces of queries that differ in their group alone, and follow one another.
struct Item {
  const Queries* pieces;
  int64_t count;
  int64_t block;
};

// All queries of a step, in pieces of which each is worth a thread's while. Pieces that differ in their group follow one
// another.
struct Plan {
  Queries* pieces;
  int64_t count, parts;
};

int64_t most_pieces(const Attention& problem);
Plan plan(const Attention& problem, Queries* pieces);

// What a block of keys takes for a piece, in no unit: products with its queries, and its keys themselves, which are turned
// over.
int64_t block_cost(const Attention& problem, const Queries& queries, int64_t block);

// Floats that one block leaves for one piece of queries, and those of all queries of a step.
int64_t part_size(const Attention& problem);
int64_t query_floats(const Attention& problem);

// Places [first, last), counted through all rows: copies their queries, scaled, to where `attend_block` reads them, and
// writes their keys and values. Queries and keys are rotated if the step rotates.
void prepare(const Attention& problem, int64_t first, int64_t last, float* queries);

// A block. The part of piece i goes to `parts + i * step`.
void attend_block(const Attention& problem, const float* queries, const Item& item, float* parts, int64_t step);

// A piece's state: parts are joined into it in the order of their blocks, and its results are written.
void begin(const Attention& problem, const Queries& piece, float* state);
void join(const Attention& problem, const Queries& piece, float* state, float* part);
void finish(const Attention& problem, const Queries& piece, float* state);

}  // namespace speccompile
