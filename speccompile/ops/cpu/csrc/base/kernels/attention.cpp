// Attention of a step's rows over their own slots. Keys are taken in blocks that start at multiples of kBlock; each block
// has its own softmax, and blocks are joined in order. So a query's result has the same bits whatever is computed
// beside it, and by however many threads. Live places alone are read, where they lie in the arena. The queries of all
// heads of a group, at all places of a piece, are one small matrix; of a block's keys 32 are turned over at once, and
// stay in the first-level cache while all queries are multiplied with them.
#include "attention.h"

#include "buffer.h"
#include "float_products.h"
#include "pair_products.h"

#include <cmath>
#include <limits>

namespace speccompile {
namespace {

// Queries that are multiplied with a block at once: enough to make up for turning its keys over.
constexpr int64_t kQueries = 48;
static_assert(kColumns % kSide == 0 && kBlock % kColumns == 0);

struct Scratch {
  Buffer keys, ancestors, scores, factors;
};

Scratch& scratch() {
  thread_local Scratch mine;
  return mine;
}

int64_t group_size(const Attention& p) {
  return p.heads / p.groups;
}

int64_t query_count(const Attention& p, const Queries& piece) {
  return (piece.last - piece.first) * group_size(p);
}

// For each query: values, weighted and summed; then for each query the greatest score, and the sum of weights.
struct Part {
  float *values, *tops, *totals;
  int64_t columns;

  Part(float* from, const Attention& p, int64_t queries)
      : values(from),
        tops(from + queries * padded(p.value_depth)),
        totals(tops + padded(queries, kLanes)),
        columns(padded(p.value_depth)) {}
};

int64_t part_floats(const Attention& p, int64_t queries) {
  return queries * padded(p.value_depth) + 2 * padded(queries, kLanes);
}

// Fetches lines of some rows: of each the share that lies from `begin` to `end` of `whole`.
template <typename T>
void fetch_rows(
    const T* rows, int64_t stride, int64_t count, int64_t features, int64_t begin, int64_t end, int64_t whole) {
  const int64_t bytes = row_size<T>(features) * static_cast<int64_t>(sizeof(T)), lines = (bytes + kCacheLine - 1) / kCacheLine;
  for (int64_t row = 0; row < count; ++row) {
    const char* from = reinterpret_cast<const char*>(rows + row * stride);
    for (int64_t line = lines * begin / whole; line < lines * end / whole; ++line) {
      __builtin_prefetch(from + line * kCacheLine, 0, 2);
    }
  }
}

// The first place that a query at `position` sees.
int64_t first_seen(const Attention& p, int64_t position) {
  int64_t first = 0;
  if (p.window != kNone) {
    first = std::max(first, position - p.window + 1);
  }
  if (p.chunk != kNone) {
    first = std::max(first, position / p.chunk * p.chunk);
  }
  return first;
}

// Hides what the heads of one place do not see of a block.
void hide(const Attention& p, float* scores, int64_t position, int64_t start, int64_t places) {
  const int64_t count = padded(places);
  const int64_t first = std::clamp<int64_t>(first_seen(p, position) - start, 0, count);
  const int64_t last = std::clamp<int64_t>(position + 1 - start, 0, count);
  for (int64_t head = 0; head < group_size(p); ++head) {
    float* const own = scores + head * kBlock;
    std::fill(own, own + first, kForbidden);
    std::fill(own + last, own + count, kForbidden);
  }
}

float reduce(const Vec& values, Vec (*of)(const Vec&, const Vec&)) {
  return at::vec::vec_reduce_all<float>([of](Vec& a, Vec& b) { return of(a, b); }, values);
}

// Scores of MANY queries become weights. A query waits for its own sums most of the time, so several take turns.
template <int MANY>
void softmax(const Attention& p, float* scores, int64_t count, float* tops, float* totals) {
  Vec greatest[MANY], sums[MANY];
#pragma GCC unroll 4
  for (int query = 0; query < MANY; ++query) {
    greatest[query] = Vec(kForbidden);
    sums[query] = Vec(0.0f);
  }
  for (int64_t i = 0; i < count; i += kLanes) {
#pragma GCC unroll 4
    for (int query = 0; query < MANY; ++query) {
      float* const at = scores + query * kBlock + i;
      Vec score = Vec::loadu(at);
      if (p.softcap != 0) {
        const Vec cap(p.softcap);
        // What is hidden stays so: capped, it would be a number.
        score = Vec::blendv((score / cap).tanh() * cap, score, score == Vec(kForbidden));
        score.store(at);
      }
      greatest[query] = at::vec::maximum(greatest[query], score);
    }
  }
#pragma GCC unroll 4
  for (int query = 0; query < MANY; ++query) {
    tops[query] = reduce(greatest[query], [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); });
    greatest[query] = Vec(tops[query]);
  }
  for (int64_t i = 0; i < count; i += kLanes) {
#pragma GCC unroll 4
    for (int query = 0; query < MANY; ++query) {
      float* const at = scores + query * kBlock + i;
      // As torch's own attention on CPUs computes it.
      const Vec weight = (Vec::loadu(at) - greatest[query]).exp_u20();
      weight.store(at);
      sums[query] = sums[query] + weight;
    }
  }
#pragma GCC unroll 4
  for (int query = 0; query < MANY; ++query) {
    totals[query] = reduce(sums[query], [](const Vec& a, const Vec& b) { return a + b; });
    if (tops[query] == kForbidden) {
      std::fill_n(scores + query * kBlock, count, 0.0f);
      totals[query] = 0.0f;
    } else if (std::isnan(tops[query])) {
      totals[query] = tops[query];  // Of no number the exponential above is one.
    }
  }
}

// Weighs the scores of some queries, of which those that a query does not see are hidden.
void weigh(const Attention& p, float* scores, int64_t queries, int64_t places, float* tops, float* totals) {
  const int64_t count = padded(places);
  for (int64_t query = 0; query < queries; query += 4) {
    float* const own = scores + query * kBlock;
    switch (queries - query) {
      case 1:
        softmax<1>(p, own, count, tops + query, totals + query);
        break;
      case 2:
        softmax<2>(p, own, count, tops + query, totals + query);
        break;
      case 3:
        softmax<3>(p, own, count, tops + query, totals + query);
        break;
      default:
        softmax<4>(p, own, count, tops + query, totals + query);
    }
  }
}

// Of the keys or values of an item.
template <typename T>
const T* first_of(const Attention& p, const Cache& cache, const Item& item) {
  return block_of<T>(cache, p.pages, p.slots[item.pieces->first / p.width], item.block) + item.pieces->group * cache.head;
}

template <typename Products>
void block_parts(const Attention& p, const float* queries, const Item& item, float* parts, int64_t step) {
  using T = typename Products::Cached;
  const Queries& piece = *item.pieces;
  const int64_t group = group_size(p), count = query_count(p, piece), of_group = p.rows * p.width * group * p.depth;
  const auto [nearest, furthest] = std::minmax_element(p.positions + piece.first, p.positions + piece.last);
  const int64_t start = item.block * kBlock, places = std::min(kBlock, *furthest + 1 - start);
  const T *keys = first_of<T>(p, p.k, item), *values = first_of<T>(p, p.v, item);
  float* turned = scratch().keys.at_least(Products::tile(p));
  float* scores = scratch().scores.at_least(item.count * count * kBlock);
  // All heads' values of a block lie in one piece: it is fetched in order while keys are multiplied, and the next block's
  // keys while values are. Of some heads the hardware fetches less by itself: their values are fetched row by row.
  const bool whole = item.count == p.groups;
  const auto bytes = [](const Cache& cache, int64_t count) { return count * cache.place * int64_t{sizeof(T)}; };
  const int64_t steps = p.depth / Products::kFeatures;
  Stream stream;
  if (whole) {
    stream = Stream(values, bytes(p.v, places), padded(places) / kColumns * item.count * steps);
  }
  for (int64_t column = 0; column < places; column += kColumns) {
    const int64_t live = std::min(kColumns, places - column);
    for (int64_t i = 0; i < item.count; ++i) {
      const auto fetch = [&](int64_t key, int64_t begin, int64_t end) {
        if (!whole) {
          const int64_t rows = std::clamp<int64_t>(live - key, 0, kSide);
          const T* from = values + (column + key) * p.v.place + i * p.v.head;
          fetch_rows(from, p.v.place, rows, p.value_depth, begin, end, p.depth);
        }
      };
      Products::turn(p, keys + column * p.k.place + i * p.k.head, live, turned, fetch);
      Products::score(
          p, count, queries + i * of_group, turned, scores + i * count * kBlock + column, stream.next(steps));
    }
  }
  // Before what the first query sees, values may be no numbers, which a weight of 0 would not hide.
  const int64_t first = std::max<int64_t>(0, first_seen(p, *nearest) - start);
  stream = Stream();
  if (whole && item.block + 1 < piece.last_block) {
    const int64_t next = std::min(kBlock, *furthest + 1 - start - kBlock);
    const int64_t products = item.count * padded(p.value_depth) / kColumns;
    const int64_t steps = products * ((places - first + Products::kFeatures - 1) / Products::kFeatures);
    stream = Stream(first_of<T>(p, p.k, {item.pieces, item.count, item.block + 1}), bytes(p.k, next), steps);
  }
  for (int64_t i = 0; i < item.count; ++i) {
    const Part part(parts + i * step, p, count);
    float* own = scores + i * count * kBlock;
    for (int64_t at = piece.first, query = 0; at < piece.last; ++at, query += group) {
      hide(p, own + query * kBlock, p.positions[at], start, places);
    }
    weigh(p, own, count, places, part.tops, part.totals);
    Products::round_weights(own, count, places);
    Products::add_up(p, count, own, values + i * p.v.head, first, places, part.values, stream);
  }
}

int64_t root_of(const Attention& p, const Queries& piece) {
  return p.positions[piece.first / p.width * p.width];
}

// A block that the root or what follows it is in. What all nodes see is multiplied at once. Each node has the keys of its
// own ancestors after it, each in the column of its position: so its result has the bits that a chain of these tokens has.
template <typename Products>
void tree_block_part(const Attention& p, const float* queries, const Queries& piece, int64_t block, Part part) {
  using T = typename Products::Cached;
  const int64_t group = group_size(p), count = query_count(p, piece), start = block * kBlock;
  const int64_t row = piece.first / p.width, slot = p.slots[row], root = root_of(p, piece);
  const Item item{&piece, 1, block};
  const T *keys = first_of<T>(p, p.k, item), *values = first_of<T>(p, p.v, item);
  const int64_t tile = Products::tile(p);
  float* turned = scratch().keys.at_least(kBlock / kColumns * tile);
  float* scores = scratch().scores.at_least(count * kBlock);
  const auto multiply = [&](int64_t query, int64_t many, int64_t column) {
    const float* keys = turned + column / kColumns * tile;
    Products::score(p, many, queries + query * p.depth, keys, scores + query * kBlock + column, {});
  };
  // What all nodes see: whole tiles of it, and what begins the tile that goes on with the root.
  const int64_t common = std::clamp<int64_t>(root - start, 0, kBlock), whole = common / kColumns * kColumns;
  for (int64_t column = 0; column < common; column += kColumns) {
    const int64_t live = std::min(kColumns, common - column);
    float* to = turned + column / kColumns * tile;
    Products::turn(p, keys + column * p.k.place, live, to, [](int64_t, int64_t, int64_t) {});
    if (column < whole) {
      multiply(0, count, column);
    }
  }
  // Calls `each(position, place of its key)` for the node and its ancestors that have their positions in this block.
  const auto over_ancestors = [&](int64_t at, auto each) {
    int64_t node = at % p.width;
    for (int64_t position = p.positions[at]; position >= root; --position) {
      if (position >= start && position < start + kBlock) {
        each(position - start, root + node);
      }
      node = p.parents[row * p.width + node];
    }
  };
  int64_t nearest = std::numeric_limits<int64_t>::max();
  for (int64_t at = piece.first, query = 0; at < piece.last; ++at, query += group) {
    const int64_t position = p.positions[at], places = std::min(kBlock, position + 1 - start);
    float* own = scores + query * kBlock;
    nearest = std::min(nearest, position);
    if (places <= 0) {
      for (int64_t head = 0; head < group; ++head) {
        std::fill_n(own + head * kBlock, kBlock, 0.0f);
      }
      std::fill_n(part.tops + query, group, kForbidden);
      std::fill_n(part.totals + query, group, 0.0f);
      continue;
    }
    over_ancestors(at, [&](int64_t column, int64_t place) {
      const T* key = place_of<T>(p.k, p.pages, slot, place) + piece.group * p.k.head;
      Products::put_key(p, key, turned + column / kColumns * tile + column % kColumns);
    });
    for (int64_t column = whole; column < places; column += kColumns) {
      multiply(query, group, column);
    }
    hide(p, own, position, start, places);
    weigh(p, own, group, places, part.tops + query, part.totals + query);
    Products::round_weights(own, group, places);
  }
  const int64_t seen = std::clamp<int64_t>(first_seen(p, nearest) - start, 0, common);
  // Places that are added up with one of a node follow with the nodes' own.
  const int64_t shared = Products::whole(common);
  Stream none;
  Products::add_up(p, count, scores, values, std::min(seen, shared), shared, part.values, none);
  float* rows = scratch().ancestors.at_least(kBlock * part.columns);
  for (int64_t at = piece.first, query = 0; at < piece.last; ++at, query += group) {
    const int64_t position = p.positions[at], places = std::min(kBlock, position + 1 - start);
    const int64_t sees = first_seen(p, position) - start, first = std::clamp<int64_t>(sees, shared, std::max(shared, places));
    for (int64_t place = shared; place < common; ++place) {
      Products::put_value(p, place < sees ? nullptr : values + place * p.v.place, rows, place);
    }
    over_ancestors(at, [&](int64_t column, int64_t place) {
      Products::put_value(p, place_of<T>(p.v, p.pages, slot, place) + piece.group * p.v.head, rows, column);
    });
    if (first < places) {
      Products::add_rows(
          p, group, scores + query * kBlock, rows, first, places, part.values + query * part.columns);
    }
  }
}

// Calls `run` with the form of products.
template <typename Run>
void with_products(const Attention& p, Run run) {
  if constexpr (kHasPairs) {
    if (are_pairs(p)) {
      return run(PairProducts());
    }
  }
  with_cached(p.cache_type, p.in_8_bits, [&](auto zero) { run(FloatProducts<decltype(zero)>()); });
}

int64_t places_at_once(const Attention& p) {
  return std::max<int64_t>(1, kQueries / group_size(p));
}

}  // namespace

int64_t most_pieces(const Attention& p) {
  const int64_t places = places_at_once(p);
  return p.rows * p.groups * ((p.width + places - 1) / places);
}

Plan plan(const Attention& p, Queries* pieces) {
  Plan made{pieces, 0, 0};
  const int64_t most = places_at_once(p), places = p.rows * p.width;
  const auto slot = [&](int64_t place) { return p.slots[place / p.width]; };
  for (int64_t first = 0, last = 0; first < places; first = last) {
    // Each row of trees has its own root.
    const int64_t end = p.parents ? (first / p.width + 1) * p.width : places;
    while (last < end && last < first + most && slot(last) == slot(first)) {
      ++last;
    }
    const auto [nearest, furthest] = std::minmax_element(p.positions + first, p.positions + last);
    const int64_t first_block = first_seen(p, *nearest) / kBlock, last_block = *furthest / kBlock + 1;
    for (int64_t group = 0; group < p.groups; ++group) {
      pieces[made.count++] = {group, first, last, first_block, last_block, *furthest + 1, made.parts};
      made.parts += last_block - first_block;
    }
  }
  return made;
}

int64_t block_cost(const Attention& p, const Queries& piece, int64_t block) {
  constexpr int64_t kKeys = 12;
  const int64_t places = std::min(kBlock, piece.last_place - block * kBlock);
  return std::max<int64_t>((kKeys + query_count(p, piece)) * padded(places) / kColumns, 1);
}

int64_t part_size(const Attention& p) {
  const int64_t places = std::min(places_at_once(p), p.rows * p.width);
  return padded(part_floats(p, places * group_size(p)), kSide);
}

int64_t query_floats(const Attention& p) {
  return p.rows * p.width * p.heads * p.depth;
}

void attend_block(const Attention& p, const float* queries, const Item& item, float* parts, int64_t step) {
  const Queries& piece = *item.pieces;
  const auto of_group = [&](int64_t i) {
    return queries + ((piece.group + i) * p.rows * p.width + piece.first) * group_size(p) * p.depth;
  };
  with_products(p, [&](auto products) {
    using Products = decltype(products);
    if (p.parents == nullptr || (item.block + 1) * kBlock <= root_of(p, piece)) {
      block_parts<Products>(p, of_group(0), item, parts, step);
      return;
    }
    for (int64_t i = 0; i < item.count; ++i) {
      const Queries& own = item.pieces[i];
      tree_block_part<Products>(p, of_group(i), own, item.block, Part(parts + i * step, p, query_count(p, own)));
    }
  });
}

// A sink is a score that came first, without a value.
void begin(const Attention& p, const Queries& piece, float* from) {
  const int64_t group = group_size(p), queries = query_count(p, piece);
  const Part state(from, p, queries);
  std::fill_n(state.values, queries * state.columns, 0.0f);
  std::fill_n(state.tops, queries, kForbidden);
  std::fill_n(state.totals, queries, p.sinks ? 1.0f : 0.0f);
  if (p.sinks) {
    with_type(p.sinks_type, [&](auto zero) {
      const auto* sinks = static_cast<const decltype(zero)*>(p.sinks) + piece.group * group;
      for (int64_t query = 0; query < queries; ++query) {
        state.tops[query] = static_cast<float>(sinks[query % group]);
      }
    });
  }
}

void join(const Attention& p, const Queries& piece, float* from, float* part) {
  const int64_t queries = query_count(p, piece), padded_queries = padded(queries, kLanes);
  const Part state(from, p, queries), next(part, p, queries);
  float* before = scratch().factors.at_least(2 * padded_queries);
  float* now = before + padded_queries;
  for (int64_t query = 0; query < queries; query += kLanes) {
    const Vec old_top = Vec::loadu(state.tops + query), new_top = Vec::loadu(next.tops + query);
    const Vec top = at::vec::maximum(old_top, new_top);
    (old_top - top).exp_u20().store(before + query);
    (new_top - top).exp_u20().store(now + query);
  }
  for (int64_t query = 0; query < queries; ++query) {
    if (next.totals[query] == 0.0f) {
      continue;  // All hidden.
    }
    float* sums = state.values + query * state.columns;
    const float* added = next.values + query * state.columns;
    for (int64_t i = 0; i < state.columns; i += kLanes) {
      at::vec::fmadd(Vec::loadu(sums + i), Vec(before[query]), Vec::loadu(added + i) * Vec(now[query]))
          .store(sums + i);
    }
    state.tops[query] = std::max(state.tops[query], next.tops[query]);
    state.totals[query] = state.totals[query] * before[query] + next.totals[query] * now[query];
  }
}

void finish(const Attention& p, const Queries& piece, float* from) {
  const int64_t group = group_size(p), queries = query_count(p, piece);
  const Part state(from, p, queries);
  with_type(p.type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t query = 0; query < queries; ++query) {
      const int64_t place = piece.first + query / group, head = piece.group * group + query % group;
      T* out = static_cast<T*>(p.out) + (place * p.heads + head) * p.value_depth;
      const float* sums = state.values + query * state.columns;
      by_vectors(p.value_depth, [&, total = Vec(state.totals[query])](int64_t i, int64_t count) {
        store(Vec::loadu(sums + i) / total, out + i, count);
      });
    }
  });
}

}  // namespace speccompile
