// Tables of successors, as torch sees them; speccompile/ops/successors.py defines the ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../kernels/successors.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

Successors table_of(const Tensor& successors, const Tensor& logprobs, const Tensor& keys) {
  STD_TORCH_CHECK(
      successors.is_contiguous() && successors.scalar_type() == ScalarType::Int && logprobs.is_contiguous() &&
          logprobs.scalar_type() == ScalarType::Float && logprobs.numel() == successors.numel() &&
          successors.size(0) >= keys.numel(),
      "speccompile: a table of successors is int32 and float32 [V + H + 1, k], its keys are [H + 1]");
  return {
      static_cast<int32_t*>(successors.data_ptr()),
      static_cast<float*>(logprobs.data_ptr()),
      integers(keys),
      successors.size(0) - keys.numel(),
      keys.numel() - 1,
      successors.size(1)};
}

void store_successors(
    Tensor successors, Tensor logprobs, Tensor keys, const Tensor& tokens, const Tensor& alive, const Tensor& slots,
    const Tensor& positions, const Tensor& read, const Tensor& drafts, const std::optional<Tensor>& parents,
    const Tensor& best, const Tensor& best_logprobs) {
  const Successors table = table_of(successors, logprobs, keys);
  const int64_t rows = slots.numel(), width = best.size(1), row_read = read.size(1), capacity = tokens.size(1);
  STD_TORCH_CHECK(
      best.size(0) == rows && best.size(2) == table.width && best_logprobs.numel() == best.numel() &&
          best_logprobs.scalar_type() == ScalarType::Float && drafts.size(1) == width - 1 && row_read >= width &&
          positions.size(0) == read.size(0) && positions.size(1) == row_read && read.size(0) >= rows &&
              (!parents || parents->size(1) == width),
      "speccompile::store_successors_: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), own_positions = side_by_side(positions), own_read = side_by_side(read),
               own_drafts = side_by_side(drafts), own_parents = side_by_side(parents.value_or(drafts)),
               own_best = side_by_side(best), own_logprobs = side_by_side(best_logprobs);
  const bool repeatable = slots.is_contiguous() && positions.is_contiguous() && read.is_contiguous() &&
      drafts.is_contiguous() && (!parents || parents->is_contiguous()) && best.is_contiguous() &&
      best_logprobs.is_contiguous();
  const bool is_tree = parents.has_value();
  const bool* lives = flags(alive);
  const int64_t *sequences = integers(tokens), *slot_of = integers(own_slots), *at = integers(own_positions),
                *token_of = integers(own_read), *draft_of = integers(own_drafts), *parent_of = integers(own_parents),
                *likeliest = integers(own_best);
  const auto* logs = static_cast<const float*>(own_logprobs.data_ptr());
  run_kernel(
      [=] {
        thread_local std::vector<char> right;
        right.resize(std::max<size_t>(right.size(), rows * width));
        // What is right is written last, over what is not.
        for (const bool fills : {true, false}) {
          for (int64_t row = 0; row < rows; ++row) {
            const int64_t slot = slot_of[row], newest = at[row * row_read], start = row * width;
            const int64_t* own = token_of + row * row_read;
            for (int64_t i = 0; i < width && lives[slot]; ++i) {
              const int64_t parent = is_tree ? parent_of[start + i] : i - 1;
              right[start + i] =
                  i == 0 || (right[start + parent] && likeliest[(start + parent) * table.width] == own[i]);
              const bool drafted = i == 0 || draft_of[row * (width - 1) + i - 1] >= 0;
              const bool known = likeliest[(start + i) * table.width] >= 0;
              if (!drafted || !known || bool(right[start + i]) == fills) {
                continue;
              }
              const int64_t before =
                  i > 0 ? own[parent] : newest > 0 ? sequences[slot * capacity + newest - 1] : -1;
              const int64_t place = (start + i) * table.width;
              table.store(before, own[i], likeliest + place, logs + place, fills);
            }
          }
        }
      },
      repeatable);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> follow_successors(
    const Tensor& successors, const Tensor& logprobs, const Tensor& keys, const Tensor& tokens, const Tensor& length,
    const Tensor& places, int64_t count, int64_t branches, double least) {
  const Successors table = table_of(successors, logprobs, keys);
  const int64_t rows = places.numel(), capacity = tokens.size(1);
  STD_TORCH_CHECK(
      branches >= 1 && branches <= table.width, "speccompile::follow_successors: ", branches, " branches of ",
      table.width, " successors");
  const Tensor own_places = side_by_side(places);
  const Tensor drafts = new_integers({rows, count}), parents = new_integers({rows, count}), lens = new_integers({rows}),
               logs = new_floats({rows, count});
  const int64_t *sequences = integers(tokens), *lengths = integers(length), *place_of = integers(own_places);
  int64_t *to = integers(drafts), *to_parents = integers(parents), *to_lens = integers(lens);
  auto* to_logs = static_cast<float*>(logs.data_ptr());
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t* sequence = sequences + place_of[row] * capacity;
          const int64_t newest = lengths[place_of[row]] - 1;
          // Without a token nothing is followed: no path has a probability of more than 1.
          const float bound = newest < 0 ? 1.0f : static_cast<float>(least);
          const Followed followed{to + row * count, to_parents + row * count, to_logs + row * count, count};
          to_lens[row] = follow(
              table, newest > 0 ? sequence[newest - 1] : -1, sequence[newest < 0 ? 0 : newest], branches, bound,
              followed);
        }
      },
      places.is_contiguous());
  return {drafts, parents, lens, logs};
}

Tensor chances_of(const Tensor& logs) {
  const Tensor own = side_by_side(logs), chances = new_floats({logs.sizes().begin(), logs.sizes().end()});
  const float* from = floats(own);
  auto* const to = static_cast<float*>(chances.data_ptr());
  const int64_t count = logs.numel();
  run_kernel(
      [=] {
        for (int64_t i = 0; i < count; ++i) {
          to[i] = static_cast<float>(std::exp(static_cast<double>(from[i])));
        }
      },
      logs.is_contiguous());
  return chances;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("chances_of", TORCH_BOX(&chances_of));
  m.impl("store_successors_", TORCH_BOX(&store_successors));
  m.impl("follow_successors", TORCH_BOX(&follow_successors));
}

}  // namespace
}  // namespace speccompile
