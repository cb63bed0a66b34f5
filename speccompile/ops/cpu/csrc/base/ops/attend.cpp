#include "attend.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "../kernels/buffer.h"
#include "share.h"

namespace speccompile {
namespace {

// Below this cost one thread is done before a second one has come, see block_cost.
constexpr int64_t kAlone = 100;
// Floats of queries and keys that one thread prepares for all.
constexpr int64_t kPreparedAlone = 65536;

// Of the calling thread, kept between calls. The other threads of a region read it.
struct Buffers {
  Buffer queries, parts, states;
  std::vector<Queries> pieces;
  std::vector<Item> items;
  std::vector<int64_t> costs;
  std::unique_ptr<std::atomic<int64_t>[]> left;
  int64_t counters = 0;
};

void check_pages(const Attention& p, int64_t slot) {
  for (int64_t i = 0; p.pages.table && i < p.pages.count; ++i) {
    const int64_t page = p.pages.table[slot * p.pages.count + i];
    STD_TORCH_CHECK(page >= 0 && page < p.cache_pages, "speccompile: slot ", slot, " has no page ", page);
  }
}

void check_places(const Attention& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t slot = p.slots[row];
    STD_TORCH_CHECK(slot >= 0 && slot < p.cache_slots, "speccompile: row ", row, " has no slot ", slot);
    for (int64_t i = 0; i < p.width; ++i) {
      const int64_t place = p.parents ? p.positions[row * p.width] + i : p.positions[row * p.width + i];
      STD_TORCH_CHECK(
          place >= 0 && place < p.cache_places, "speccompile: row ", row, " writes beyond its slot, at ", place);
    }
    check_pages(p, slot);
  }
}

int64_t piece_cost(const Attention& p, const Queries& piece) {
  int64_t cost = 0;
  for (int64_t block = piece.first_block; block < piece.last_block; ++block) {
    cost += block_cost(p, piece, block);
  }
  return cost;
}

// Lists items with their costs, `all` of them together. Block by block, with the pieces of all groups: memory is read in
// order. Where the share of one of the `threads` ends, a block is cut between two groups.
void list_items(const Attention& p, const Plan& made, int64_t threads, int64_t all, Buffers& own) {
  own.items.clear();
  own.costs.clear();
  int64_t spent = 0, thread = 1;
  for (int64_t first = 0, last = 0; first < made.count; first = last) {
    const Queries& leader = made.pieces[first];
    while (last < made.count && made.pieces[last].first == leader.first) {
      ++last;
    }
    for (int64_t block = leader.first_block; block < leader.last_block; ++block) {
      const int64_t cost = block_cost(p, leader, block);
      for (int64_t piece = first; piece < last;) {
        int64_t count = last - piece;
        for (; thread < threads; ++thread) {
          const int64_t wanted = (all * thread / threads - spent + cost / 2) / cost;
          if (wanted > 0) {
            count = std::min(count, wanted);
            break;
          }
        }
        own.items.push_back({made.pieces + piece, count, block});
        own.costs.push_back(cost * count);
        piece += count;
        spent += cost * count;
      }
    }
  }
}

void attend_in_order(const Attention& p, const Plan& made, const float* queries, Buffers& own) {
  list_items(p, made, 1, 0, own);
  const int64_t size = part_size(p);
  float* const states = own.states.at_least(p.groups * size);
  float* const parts = own.parts.at_least(p.groups * size);
  for (const Item& item : own.items) {
    attend_block(p, queries, item, parts, size);
    for (int64_t i = 0; i < item.count; ++i) {
      const Queries& piece = item.pieces[i];
      if (item.block == piece.first_block) {
        begin(p, piece, states + i * size);
      }
      join(p, piece, states + i * size, parts + i * size);
      if (item.block + 1 == piece.last_block) {
        finish(p, piece, states + i * size);
      }
    }
  }
}

// Pieces are shared out, each with all of its blocks.
void attend_by_pieces(const Attention& p, const Plan& made, const float* queries, Buffers& own) {
  const int64_t size = part_size(p);
  share_out(own.costs, [&p, &made, size, queries](int64_t i) {
    thread_local Buffer buffer;
    float* const state = buffer.at_least(2 * size);
    const Queries& piece = made.pieces[i];
    begin(p, piece, state);
    for (int64_t block = piece.first_block; block < piece.last_block; ++block) {
      attend_block(p, queries, {&piece, 1, block}, state + size, size);
      join(p, piece, state, state + size);
    }
    finish(p, piece, state);
  });
}

// Blocks are shared out: few queries, or many of one row. The thread that computes the last one of a piece joins them.
void attend_by_blocks(const Attention& p, const Plan& made, int64_t all, const float* queries, Buffers& own) {
  list_items(p, made, thread_count(), all, own);
  const int64_t size = part_size(p);
  float* const parts = own.parts.at_least(made.parts * size);
  if (own.counters < made.count) {
    own.left = std::make_unique<std::atomic<int64_t>[]>(made.count);
    own.counters = made.count;
  }
  std::atomic<int64_t>* const left = own.left.get();
  for (int64_t i = 0; i < made.count; ++i) {
    left[i].store(made.pieces[i].last_block - made.pieces[i].first_block, std::memory_order_relaxed);
  }
  share_out(own.costs, [&p, items = own.items.data(), size, parts, left, first = made.pieces, queries](int64_t i) {
    const Item& item = items[i];
    const int64_t blocks = item.pieces->last_block - item.pieces->first_block;
    float* const of_pieces = parts + item.pieces->first_part * size;
    attend_block(p, queries, item, of_pieces + (item.block - item.pieces->first_block) * size, blocks * size);
    for (int64_t j = 0; j < item.count; ++j) {
      const Queries& piece = item.pieces[j];
      if (left[&piece - first].fetch_sub(1, std::memory_order_acq_rel) > 1) {
        continue;
      }
      thread_local Buffer buffer;
      float* const state = buffer.at_least(size);
      begin(p, piece, state);
      for (int64_t block = 0; block < blocks; ++block) {
        join(p, piece, state, of_pieces + (j * blocks + block) * size);
      }
      finish(p, piece, state);
    }
  });
}

}  // namespace

void attend(const Attention& p) {
  thread_local Buffers own;
  if (p.rotates) {
    check_places(p);
  }
  own.pieces.resize(most_pieces(p));
  const Plan made = plan(p, own.pieces.data());
  if (made.count == 0) {
    return;
  }
  float* const queries = own.queries.at_least(query_floats(p));
  const int64_t places = p.rows * p.width;
  if (query_floats(p) <= kPreparedAlone) {
    prepare(p, 0, places, queries);
  } else {
    parallel_for(0, places, 4, [&p, queries](int64_t first, int64_t last) { prepare(p, first, last, queries); });
  }
  own.costs.clear();
  int64_t dearest = 0, all = 0;
  for (int64_t i = 0; i < made.count; ++i) {
    const Queries& piece = made.pieces[i];
    own.costs.push_back(piece_cost(p, piece));
    dearest = std::max(dearest, own.costs.back());
    all += own.costs.back();
  }
  const int64_t threads = thread_count();
  if (threads == 1 || all <= kAlone) {
    attend_in_order(p, made, queries, own);
  } else if (dearest * 4 * threads <= all) {
    attend_by_pieces(p, made, queries, own);
  } else {
    attend_by_blocks(p, made, all, queries, own);
  }
}

}  // namespace speccompile
