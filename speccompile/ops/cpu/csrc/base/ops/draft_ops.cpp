// Reads of the rows' texts by drafters, and writes of their state, as torch sees them; speccompile/ops/draft_rows.py defines
// the ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

std::tuple<Tensor, Tensor, Tensor> newest_tokens_op(
    const Tensor& tokens, const Tensor& length, const Tensor& limit, const Tensor& slots, int64_t draft_len,
    int64_t max_len) {
  const int64_t rows = slots.size(0), capacity = tokens.size(1);
  const Tensor own_slots = side_by_side(slots);
  const Tensor newest = new_integers({rows, 1}), places = new_integers({rows, 1}), lens = new_integers({rows});
  const int64_t *texts = integers(tokens), *lengths = integers(length), *limits = integers(limit);
  const int64_t* slot_of = integers(own_slots);
  int64_t *to_newest = integers(newest), *to_places = integers(places), *to_lens = integers(lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], at = std::max<int64_t>(lengths[slot] - 1, 0);
          const int64_t longest = std::clamp<int64_t>(max_len - 1 - lengths[slot], 0, draft_len);
          to_newest[row] = texts[slot * capacity + at];
          to_places[row] = at;
          to_lens[row] = std::max<int64_t>(std::min(longest, limits[slot] - lengths[slot] - 1), 0);
        }
      },
      slots.is_contiguous());
  return {newest, places, lens};
}

std::tuple<Tensor, Tensor> next_token_op(
    const Tensor& drawn, const Tensor& position, const std::optional<Tensor>& ids) {
  const int64_t count = drawn.numel();
  STD_TORCH_CHECK(position.numel() == count, "speccompile::next_token: the sizes do not fit");
  const Tensor own = side_by_side(drawn), before = side_by_side(position);
  const Tensor token = new_integers({drawn.sizes().begin(), drawn.sizes().end()});
  const Tensor place = new_integers({position.sizes().begin(), position.sizes().end()});
  const int64_t *from = integers(own), *places = integers(before), *known = ids ? integers(*ids) : nullptr;
  int64_t *to = integers(token), *to_place = integers(place);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t chosen = std::max<int64_t>(from[i], 0);
          to[i] = known ? std::max<int64_t>(known[chosen], 0) : chosen;
          to_place[i] = places[i] + 1;
        }
      },
      drawn.is_contiguous() && position.is_contiguous());
  return {token, place};
}

Tensor tokens_after_op(const Tensor& tokens, const Tensor& slots, const Tensor& positions) {
  const int64_t rows = positions.size(0), width = positions.size(1), capacity = tokens.size(1);
  STD_TORCH_CHECK(slots.numel() == rows, "speccompile::tokens_after: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(positions), after = new_integers({rows, width});
  const int64_t *texts = integers(tokens), *slot_of = integers(own_slots), *places = integers(own);
  int64_t* to = integers(after);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          to[i] = texts[slot_of[i / width] * capacity + std::min(places[i] + 1, capacity - 1)];
        }
      },
      slots.is_contiguous() && positions.is_contiguous());
  return after;
}

void store_newest_op(
    Tensor newest, const Tensor& length, const Tensor& slots, const Tensor& positions, const Tensor& hidden,
    int64_t dummy_slot) {
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  STD_TORCH_CHECK(
      newest.scalar_type() == hidden.scalar_type() && newest.is_contiguous() && newest.size(1) == hidden.size(2) &&
          slots.numel() == rows && positions.size(0) == rows,
      "speccompile::store_newest_: the sizes or dtypes do not fit");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(positions), given = side_by_side(hidden);
  const int64_t bytes = hidden.size(2) * (type_of(hidden) == Type::Float ? 4 : 2), stride = own.size(1);
  const int64_t *lengths = integers(length), *slot_of = integers(own_slots), *places = integers(own);
  const char* from = static_cast<const char*>(given.data_ptr());
  char* to = static_cast<char*>(newest.data_ptr());
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], at = lengths[slot] - 2 - places[row * stride];
          const bool inside = at >= 0 && at < width;
          const int64_t read = std::clamp<int64_t>(at, 0, width - 1);
          std::memcpy(to + (inside ? slot : dummy_slot) * bytes, from + (row * width + read) * bytes, bytes);
        }
      },
      slots.is_contiguous() && positions.is_contiguous() && hidden.is_contiguous());
}

Tensor rows_of_op(const Tensor& state, const Tensor& slots) {
  const int64_t rows = slots.numel(), slot_count = state.size(0);
  STD_TORCH_CHECK(state.is_contiguous(), "speccompile::rows_of: the state is not contiguous");
  std::vector<int64_t> sizes(state.sizes().begin(), state.sizes().end());
  sizes[0] = rows;
  const Tensor own_slots = side_by_side(slots), found = new_tensor(sizes, dtype_of(state));
  const int64_t bytes = state.numel() / std::max<int64_t>(slot_count, 1) * static_cast<int64_t>(state.element_size());
  const int64_t* slot_of = integers(own_slots);
  const char* from = static_cast<const char*>(state.data_ptr());
  char* to = static_cast<char*>(found.data_ptr());
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row];
          STD_TORCH_CHECK(slot >= 0 && slot < slot_count, "speccompile: row ", row, " has no slot ", slot);
          std::memcpy(to + row * bytes, from + slot * bytes, bytes);
        }
      },
      slots.is_contiguous());
  return found;
}

Tensor cut_drafts_op(const Tensor& tokens, const Tensor& lens, int64_t begin) {
  const int64_t rows = tokens.size(0), width = tokens.size(1);
  STD_TORCH_CHECK(lens.numel() == rows, "speccompile::cut_drafts: the sizes do not fit");
  const Tensor own = side_by_side(tokens), own_lens = side_by_side(lens), drafts = new_integers({rows, width});
  const int64_t *from = integers(own), *counts = integers(own_lens);
  int64_t* to = integers(drafts);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          to[i] = begin + i % width < counts[i / width] ? from[i] : -1;
        }
      },
      tokens.is_contiguous() && lens.is_contiguous());
  return drafts;
}

void store_chain_op(
    Tensor stored_drafts, Tensor stored_lens, const Tensor& slots, const Tensor& drafts, const Tensor& lens,
    int64_t begin) {
  const int64_t rows = drafts.size(0), width = drafts.size(1), longest = stored_drafts.size(1);
  STD_TORCH_CHECK(
      slots.numel() == rows && lens.numel() == rows && begin >= 0 && begin + width <= longest,
      "speccompile::store_chain_: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(drafts), own_lens = side_by_side(lens);
  const int64_t *slot_of = integers(own_slots), *from = integers(own), *counts = integers(own_lens);
  int64_t *to = integers(stored_drafts), *to_lens = integers(stored_lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          std::copy_n(from + row * width, width, to + slot_of[row] * longest + begin);
          to_lens[slot_of[row]] = counts[row];
        }
      },
      slots.is_contiguous() && drafts.is_contiguous() && lens.is_contiguous());
}

Tensor network_positions_op(const Tensor& positions, int64_t back, int64_t most) {
  const int64_t count = positions.numel();
  const Tensor own = side_by_side(positions);
  const Tensor moved = new_integers({positions.sizes().begin(), positions.sizes().end()});
  const int64_t* from = integers(own);
  int64_t* to = integers(moved);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < count; ++i) {
          to[i] = std::clamp<int64_t>(from[i] - back, 0, most);
        }
      },
      positions.is_contiguous());
  return moved;
}

Tensor side_by_side_op(const std::vector<Tensor>& parts) {
  STD_TORCH_CHECK(!parts.empty(), "speccompile::side_by_side: there is nothing to join");
  const int64_t rows = parts[0].numel() / std::max<int64_t>(parts[0].size(-1), 1);
  const int64_t bytes = parts[0].element_size();
  struct Part {
    const char* from;
    int64_t bytes;
  };
  std::vector<Tensor> given;
  std::vector<Part> sources;
  int64_t width = 0;
  bool repeatable = true;
  for (const Tensor& part : parts) {
    STD_TORCH_CHECK(
        part.scalar_type() == parts[0].scalar_type() && part.numel() == rows * part.size(-1),
        "speccompile::side_by_side: the sizes or dtypes do not fit");
    given.push_back(side_by_side(part));
    sources.push_back({static_cast<const char*>(given.back().data_ptr()), part.size(-1) * bytes});
    width += part.size(-1);
    repeatable = repeatable && part.is_contiguous();
  }
  std::vector<int64_t> sizes{parts[0].sizes().begin(), parts[0].sizes().end()};
  sizes.back() = width;
  const Tensor joined = new_tensor(sizes, dtype_of(parts[0]));
  char* to = static_cast<char*>(joined.data_ptr());
  run_kernel(
      [=] {
        char* at = to;
        for (int64_t row = 0; row < rows; ++row) {
          for (const Part& source : sources) {
            std::memcpy(at, source.from + row * source.bytes, source.bytes);
            at += source.bytes;
          }
        }
      },
      repeatable);
  return joined;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("newest_tokens", TORCH_BOX(&newest_tokens_op));
  m.impl("next_token", TORCH_BOX(&next_token_op));
  m.impl("tokens_after", TORCH_BOX(&tokens_after_op));
  m.impl("store_newest_", TORCH_BOX(&store_newest_op));
  m.impl("rows_of", TORCH_BOX(&rows_of_op));
  m.impl("cut_drafts", TORCH_BOX(&cut_drafts_op));
  m.impl("store_chain_", TORCH_BOX(&store_chain_op));
  m.impl("side_by_side", TORCH_BOX(&side_by_side_op));
  m.impl("network_positions", TORCH_BOX(&network_positions_op));
}

}  // namespace
}  // namespace speccompile
