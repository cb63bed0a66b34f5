// Attention of a step's rows over their own slots. Keys are taken in blocks that start at multiples of kBlock; each block
// has its own softmax, and blocks are joined in order. So a query's result has the same bits whatever is computed
// beside it, and by however many threads. Live places alone are read, where they lie in the arena.
#include "attention.h"

#include "tile.h"

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace speccompile {
namespace {

constexpr int64_t kBlock = 128;
// Queries that are multiplied with a block at once: enough to make up for transposing its keys.
constexpr int64_t kQueries = 48;

int64_t padded(int64_t size) {
  return (size + kColumns - 1) / kColumns * kColumns;
}

// A thread's buffers, kept between calls: a step makes many.
struct Scratch {
  std::vector<float> queries, keys, values, scores, part, state;
};

float* at_least(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) {
    buffer.resize(size);
  }
  return buffer.data();
}

Scratch& scratch() {
  thread_local Scratch mine;
  return mine;
}

// For each query: values, weighted and summed; then for each query the greatest score, and the sum of weights.
struct Part {
  float *values, *tops, *totals;
  int64_t columns;

  Part(float* from, const Attention& problem, int64_t queries)
      : values(from),
        tops(from + queries * padded(problem.value_depth)),
        totals(tops + queries),
        columns(padded(problem.value_depth)) {}
};

int64_t part_floats(const Attention& problem, int64_t queries) {
  return queries * (padded(problem.value_depth) + 2);
}

// Writes keys[padded(depth), kBlock]; after the last place up to a multiple of kColumns stand zeros. Before some
// places' keys it calls each(first place, how many).
template <typename T, typename Each>
void transpose(const T* from, int64_t stride, int64_t places, int64_t depth, float* keys, Each each) {
  constexpr int64_t kSide = 16;
  static_assert(kColumns % kSide == 0);
  alignas(64) float square[kSide * kSide];
  for (int64_t place = 0; place < padded(places); place += kSide) {
    const int64_t live = std::clamp<int64_t>(places - place, 0, kSide);
    each(place, live);
    for (int64_t feature = 0; feature < depth; feature += kSide) {
      float* to = keys + feature * kBlock + place;
      const int64_t wanted = std::min(kSide, depth - feature);
      if constexpr (std::is_same_v<T, float>) {
        if (live == kSide && wanted == kSide) {
          at::vec::transpose_mxn<float, kSide, kSide>(from + place * stride + feature, stride, to, kBlock);
          continue;
        }
      }
      std::fill_n(square, kSide * kSide, 0.0f);
      for (int64_t i = 0; i < live; ++i) {
        const T* key = from + (place + i) * stride + feature;
        for (int64_t j = 0; j < wanted; ++j) {
          square[i * kSide + j] = static_cast<float>(key[j]);
        }
      }
      at::vec::transpose_mxn<float, kSide, kSide>(square, kSide, to, kBlock);
    }
  }
}

// The first place that a query at `position` sees.
int64_t first_seen(const Attention& problem, int64_t position) {
  int64_t first = 0;
  if (problem.window != kNone) {
    first = std::max(first, position - problem.window + 1);
  }
  if (problem.chunk != kNone) {
    first = std::max(first, position / problem.chunk * problem.chunk);
  }
  return first;
}

void hide(const Attention& problem, float* scores, int64_t position, int64_t start, int64_t count) {
  const int64_t first = std::clamp<int64_t>(first_seen(problem, position) - start, 0, count);
  const int64_t last = std::clamp<int64_t>(position + 1 - start, 0, count);
  std::fill(scores, scores + first, kForbidden);
  std::fill(scores + last, scores + count, kForbidden);
}

// Scores become weights.
void softmax(const Attention& problem, float* scores, int64_t count, float& top, float& total) {
  Vec greatest(kForbidden);
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec score = Vec::loadu(scores + i);
    if (problem.softcap != 0) {
      const Vec cap(problem.softcap);
      // What is hidden stays so: capped, it would be a number.
      score = Vec::blendv((score / cap).tanh() * cap, score, score == Vec(kForbidden));
      score.store(scores + i);
    }
    greatest = at::vec::maximum(greatest, score);
  }
  top = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, greatest);
  total = 0.0f;
  if (top == kForbidden) {
    return;
  }
  Vec sum(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = (Vec::loadu(scores + i) - Vec(top)).exp();
    weight.store(scores + i);
    sum = sum + weight;
  }
  total = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
}

template <typename T>
float* gather_queries(const Attention& p, const Queries& piece) {
  const int64_t group = p.heads / p.groups;
  float* gathered = at_least(scratch().queries, (piece.last - piece.first) * group * p.depth);
  float* to = gathered;
  for (int64_t place = piece.first; place < piece.last; ++place) {
    const T* all_heads = static_cast<const T*>(p.q) + place / p.width * p.q_row + place % p.width * p.q_place;
    for (int64_t head = piece.group * group; head < (piece.group + 1) * group; ++head, to += p.depth) {
      const T* from = all_heads + head * p.q_head;
      for (int64_t i = 0; i < p.depth; ++i) {
        to[i] = static_cast<float>(from[i]) * p.scale;
      }
    }
  }
  return gathered;
}

template <typename T>
void block_part(const Attention& p, const Queries& piece, const float* gathered, int64_t block, Part part) {
  const int64_t group = p.heads / p.groups, queries = (piece.last - piece.first) * group;
  const auto [nearest_at, furthest_at] = std::minmax_element(p.positions + piece.first, p.positions + piece.last);
  const int64_t nearest = *nearest_at, furthest = *furthest_at;
  const int64_t start = block * kBlock, places = std::min(kBlock, furthest + 1 - start), count = padded(places);
  const int64_t slot = p.slots[piece.first / p.width];
  const T* keys = static_cast<const T*>(p.k) + slot * p.k_slot + start * p.k_place + piece.group * p.k_head;
  const T* values = static_cast<const T*>(p.v) + slot * p.v_slot + start * p.v_place + piece.group * p.v_head;

  float* transposed = at_least(scratch().keys, padded(p.depth) * kBlock);
  float* scores = at_least(scratch().scores, queries * kBlock);
  // Values are wanted after the softmax: they are fetched from memory while keys are turned over.
  transpose<T>(keys, p.k_place, places, p.depth, transposed, [&](int64_t from, int64_t live) {
    for (int64_t place = from; place < from + live; ++place) {
      const char* value = reinterpret_cast<const char*>(values + place * p.v_place);
      for (int64_t i = 0; i < p.value_depth * static_cast<int64_t>(sizeof(T)); i += kCacheLine) {
        __builtin_prefetch(value + i, 0, 2);
      }
    }
  });
  for (int64_t column = 0; column < count; column += kColumns) {
    product<float>(queries, gathered, p.depth, transposed + column, kBlock, p.depth, scores + column, kBlock, false);
  }
  for (int64_t query = 0; query < queries; ++query) {
    float* own = scores + query * kBlock;
    hide(p, own, p.positions[piece.first + query / group], start, count);
    softmax(p, own, count, part.tops[query], part.totals[query]);
    if (part.totals[query] == 0.0f) {
      std::fill_n(own, count, 0.0f);
    }
  }
  const float* rows;
  int64_t stride;
  if (std::is_same_v<T, float> && part.columns == p.value_depth) {
    rows = reinterpret_cast<const float*>(values);
    stride = p.v_place;
  } else {
    float* copied = at_least(scratch().values, kBlock * part.columns);
    for (int64_t place = 0; place < places; ++place) {
      float* to = copied + place * part.columns;
      for (int64_t i = 0; i < p.value_depth; ++i) {
        to[i] = static_cast<float>(values[place * p.v_place + i]);
      }
      std::fill(to + p.value_depth, to + part.columns, 0.0f);
    }
    rows = copied;
    stride = part.columns;
  }
  // Before what the first query sees, values may be no numbers, which a weight of 0 would not hide.
  const int64_t first = std::max<int64_t>(0, first_seen(p, nearest) - start);
  for (int64_t column = 0; column < part.columns; column += kColumns) {
    product<float>(
        queries, scores + first, kBlock, rows + first * stride + column, stride, places - first, part.values + column,
        part.columns, false);
  }
}

int64_t root_of(const Attention& p, const Queries& piece) {
  return p.positions[piece.first / p.width * p.width];
}

// A block that the root or what follows it is in. Each node has the keys of its own ancestors there, each in the column of its
// position: so its result has the bits that a chain of these tokens has.
template <typename T>
void tree_block_part(const Attention& p, const Queries& piece, const float* gathered, int64_t block, Part part) {
  const int64_t group = p.heads / p.groups, start = block * kBlock, root = root_of(p, piece);
  const int64_t row = piece.first / p.width, slot = p.slots[row];
  const T* keys = static_cast<const T*>(p.k) + slot * p.k_slot + piece.group * p.k_head;
  const T* values = static_cast<const T*>(p.v) + slot * p.v_slot + piece.group * p.v_head;
  float* transposed = at_least(scratch().keys, padded(p.depth) * kBlock);
  float* scores = at_least(scratch().scores, group * kBlock);
  float* rows = at_least(scratch().values, kBlock * part.columns);
  const auto copy_value = [&](int64_t from, int64_t to) {
    float* copied = rows + to * part.columns;
    for (int64_t i = 0; i < p.value_depth; ++i) {
      copied[i] = static_cast<float>(values[from * p.v_place + i]);
    }
    std::fill(copied + p.value_depth, copied + part.columns, 0.0f);
  };
  // What all nodes see.
  const int64_t common = std::clamp<int64_t>(root - start, 0, kBlock);
  transpose<T>(keys + start * p.k_place, p.k_place, common, p.depth, transposed, [](int64_t, int64_t) {});
  for (int64_t place = 0; place < common; ++place) {
    copy_value(start + place, place);
  }
  for (int64_t at = piece.first; at < piece.last; ++at) {
    const int64_t position = p.positions[at], first_query = (at - piece.first) * group;
    const int64_t places = std::min(kBlock, position + 1 - start);
    if (places <= 0) {
      std::fill_n(part.tops + first_query, group, kForbidden);
      std::fill_n(part.totals + first_query, group, 0.0f);
      continue;
    }
    int64_t node = at % p.width;
    for (int64_t ancestor = position; ancestor >= root; --ancestor, node = p.parents[row * p.width + node]) {
      const int64_t column = ancestor - start;
      if (column < 0 || column >= kBlock) {
        continue;
      }
      const T* key = keys + (root + node) * p.k_place;
      for (int64_t i = 0; i < p.depth; ++i) {
        transposed[i * kBlock + column] = static_cast<float>(key[i]);
      }
      copy_value(root + node, column);
    }
    const int64_t count = padded(places);
    for (int64_t column = 0; column < count; column += kColumns) {
      product<float>(
          group, gathered + first_query * p.depth, p.depth, transposed + column, kBlock, p.depth, scores + column,
          kBlock, false);
    }
    for (int64_t head = 0; head < group; ++head) {
      float* own = scores + head * kBlock;
      hide(p, own, position, start, count);
      softmax(p, own, count, part.tops[first_query + head], part.totals[first_query + head]);
      if (part.totals[first_query + head] == 0.0f) {
        std::fill_n(own, count, 0.0f);
      }
    }
    const int64_t first = std::clamp<int64_t>(first_seen(p, position) - start, 0, places);
    for (int64_t column = 0; column < part.columns; column += kColumns) {
      product<float>(
          group, scores + first, kBlock, rows + first * part.columns + column, part.columns, places - first,
          part.values + first_query * part.columns + column, part.columns, false);
    }
  }
}

// Of the queries of a piece over a block of keys.
template <typename T>
void part_of(const Attention& p, const Queries& piece, const float* gathered, int64_t block, Part part) {
  if (p.parents != nullptr && (block + 1) * kBlock > root_of(p, piece)) {
    tree_block_part<T>(p, piece, gathered, block, part);
  } else {
    block_part<T>(p, piece, gathered, block, part);
  }
}

// Before any block. A sink is a score that came first, without a value.
void begin(const Attention& p, const Queries& piece, int64_t queries, Part state) {
  const int64_t group = p.heads / p.groups;
  std::fill_n(state.values, queries * state.columns, 0.0f);
  for (int64_t query = 0; query < queries; ++query) {
    state.tops[query] = p.sinks ? p.sinks[piece.group * group + query % group] : kForbidden;
    state.totals[query] = p.sinks ? 1.0f : 0.0f;
  }
}

void join(const Attention& p, int64_t queries, Part state, Part next) {
  for (int64_t query = 0; query < queries; ++query) {
    if (next.totals[query] == 0.0f) {
      continue;  // All hidden.
    }
    const float top = std::max(state.tops[query], next.tops[query]);
    const float before = std::exp(state.tops[query] - top), now = std::exp(next.tops[query] - top);
    float* sums = state.values + query * state.columns;
    const float* added = next.values + query * state.columns;
    for (int64_t i = 0; i < state.columns; i += kLanes) {
      at::vec::fmadd(Vec::loadu(sums + i), Vec(before), Vec::loadu(added + i) * Vec(now)).store(sums + i);
    }
    state.tops[query] = top;
    state.totals[query] = state.totals[query] * before + next.totals[query] * now;
  }
}

void finish(const Attention& p, const Queries& piece, int64_t queries, Part state) {
  const int64_t group = p.heads / p.groups;
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t place = piece.first + query / group, head = piece.group * group + query % group;
    float* out = p.out + (place * p.heads + head) * p.value_depth;
    for (int64_t i = 0; i < p.value_depth; ++i) {
      out[i] = state.values[query * state.columns + i] / state.totals[query];
    }
  }
}

int64_t places_at_once(const Attention& problem) {
  return std::max<int64_t>(1, kQueries / (problem.heads / problem.groups));
}

int64_t query_count(const Attention& problem, const Queries& piece) {
  return (piece.last - piece.first) * (problem.heads / problem.groups);
}

}  // namespace

int64_t most_pieces(const Attention& problem) {
  const int64_t places = places_at_once(problem);
  return problem.rows * problem.groups * ((problem.width + places - 1) / places);
}

Plan plan(const Attention& problem, Queries* pieces) {
  Plan made{pieces, 0, 0};
  const int64_t most = places_at_once(problem), places = problem.rows * problem.width;
  const auto slot = [&](int64_t place) { return problem.slots[place / problem.width]; };
  for (int64_t first = 0, last = 0; first < places; first = last) {
    // Each row of trees has its own root.
    const int64_t end = problem.parents ? (first / problem.width + 1) * problem.width : places;
    while (last < end && last < first + most && slot(last) == slot(first)) {
      ++last;
    }
    const auto [nearest, furthest] = std::minmax_element(problem.positions + first, problem.positions + last);
    const int64_t first_block = first_seen(problem, *nearest) / kBlock, last_block = *furthest / kBlock + 1;
    for (int64_t group = 0; group < problem.groups; ++group) {
      pieces[made.count++] = {group, first, last, first_block, last_block, made.parts};
      made.parts += last_block - first_block;
    }
  }
  return made;
}

int64_t block_cost(const Attention& problem, const Queries& piece) {
  constexpr int64_t kKeys = 12;
  return kKeys + query_count(problem, piece);
}

int64_t part_size(const Attention& problem) {
  const int64_t places = std::min(places_at_once(problem), problem.rows * problem.width);
  return part_floats(problem, places * (problem.heads / problem.groups));
}

void attend(const Attention& problem, const Queries& piece) {
  const int64_t queries = query_count(problem, piece);
  const Part state(at_least(scratch().state, part_floats(problem, queries)), problem, queries);
  const Part part(at_least(scratch().part, part_floats(problem, queries)), problem, queries);
  begin(problem, piece, queries, state);
  with_type(problem.type, [&](auto zero) {
    using T = decltype(zero);
    const float* gathered = gather_queries<T>(problem, piece);
    for (int64_t block = piece.first_block; block < piece.last_block; ++block) {
      part_of<T>(problem, piece, gathered, block, part);
      join(problem, queries, state, part);
    }
  });
  finish(problem, piece, queries, state);
}

void attend_block(const Attention& problem, const Queries& piece, int64_t block, float* part) {
  with_type(problem.type, [&](auto zero) {
    using T = decltype(zero);
    part_of<T>(
        problem, piece, gather_queries<T>(problem, piece), block, Part(part, problem, query_count(problem, piece)));
  });
}

void join_blocks(const Attention& problem, const Queries& piece, const float* parts) {
  const int64_t queries = query_count(problem, piece);
  const Part state(at_least(scratch().state, part_floats(problem, queries)), problem, queries);
  begin(problem, piece, queries, state);
  for (int64_t block = piece.first_block; block < piece.last_block; ++block) {
    float* part = const_cast<float*>(parts) + (piece.first_part + block - piece.first_block) * part_size(problem);
    join(problem, queries, state, Part(part, problem, queries));
  }
  finish(problem, piece, queries, state);
}

}  // namespace speccompile
