// What a step does around the target model, as torch sees it; speccompile/ops/commit.py, ngram.py
// and prediction.py define it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "../kernels/commit.h"
#include "../kernels/ngram.h"
#include "../kernels/prediction.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

void accept_commit_op(
    Tensor tokens, Tensor length, const Tensor& limit, Tensor alive, const Tensor& eos, Tensor emitted, Tensor accepted,
    Tensor proposed, const Tensor& slots, const Tensor& target_tokens, const Tensor& row_draft_lens,
    const std::optional<Tensor>& row_accepted, const std::optional<Tensor>& drafts,
    const std::optional<Tensor>& ready) {
  // State lies in the arena; of what a step computed the layout is not known.
  const auto given = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional<Tensor>(side_by_side(*tensor)) : std::nullopt;
  };
  const Tensor own_slots = side_by_side(slots), target = side_by_side(target_tokens),
               offered = side_by_side(row_draft_lens);
  const std::optional<Tensor> counted = given(row_accepted), drafted = given(drafts), waits = given(ready);
  const int64_t width = target.size(1), ends = eos.size(1), capacity = tokens.size(1);
  const int64_t rows = own_slots.size(0);
  STD_TORCH_CHECK(
      target.size(0) == rows && offered.numel() == rows && (!counted || counted->numel() == rows) &&
          (!drafted || (drafted->size(0) == rows && drafted->size(1) == width - 1)) && (!waits || waits->numel() == rows) &&
          (counted || drafted),
      "speccompile::accept_commit_: the sizes do not fit");
  const int64_t *slot_of = integers(own_slots), *targets = integers(target), *offers = integers(offered);
  const int64_t *counts = counted ? integers(*counted) : nullptr, *drafts_of = drafted ? integers(*drafted) : nullptr;
  const bool* is_ready = waits ? flags(*waits) : nullptr;
  const int64_t *limits = integers(limit), *all_ends = integers(eos);
  int64_t *texts = integers(tokens), *lengths = integers(length), *all_emitted = integers(emitted),
          *all_accepted = integers(accepted), *all_proposed = integers(proposed);
  bool* are_alive = flags(alive);
  const auto same = [](const std::optional<Tensor>& tensor) { return !tensor || tensor->is_contiguous(); };
  const bool repeatable = slots.is_contiguous() && target_tokens.is_contiguous() && row_draft_lens.is_contiguous() &&
      same(row_accepted) && same(drafts) && same(ready);
  run_kernel(
      [=] {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t slot = slot_of[row];
        RowOutcome outcome{};
        outcome.target = targets + row * width;
        outcome.width = width;
        outcome.offered = offers[row];
        outcome.accepted = counts
            ? counts[row]
            : count_agreeing(drafts_of + row * (width - 1), outcome.target, width - 1, outcome.offered);
        outcome.acts = are_alive[slot] && (is_ready == nullptr || is_ready[row]);
        const RowState state{
            texts + slot * capacity, lengths + slot,      are_alive + slot,
            all_emitted + slot,      all_accepted + slot, all_proposed + slot};
        commit_row(state, limits[slot], all_ends + slot * ends, ends, outcome);
      }
      },
      repeatable);
}

std::tuple<Tensor, Tensor> match_ngram_op(
    const Tensor& tokens, const Tensor& length, const Tensor& slots, int64_t max_ngram, int64_t min_ngram,
    int64_t draft_len) {
  const Tensor own_slots = side_by_side(slots);
  const int64_t *texts = integers(tokens), *lengths = integers(length), *slot_of = integers(own_slots);
  const int64_t rows = slots.size(0), capacity = tokens.size(1);
  Tensor drafts = new_integers({rows, draft_len}), lens = new_integers({rows});
  int64_t *found = integers(drafts), *counts = integers(lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row];
          counts[row] = match_ngram(
              texts + slot * capacity, lengths[slot], max_ngram, min_ngram, found + row * draft_len, draft_len);
        }
      },
      slots.is_contiguous());
  return {drafts, lens};
}

std::tuple<Tensor, Tensor, Tensor> ngram_tree_op(
    const Tensor& tokens, const Tensor& length, int64_t max_ngram, int64_t min_ngram, int64_t nodes) {
  const Tensor own_tokens = side_by_side(tokens), own_length = side_by_side(length);
  const int64_t rows = tokens.size(0), capacity = tokens.size(1);
  // As speccompile/ops/ngram.py has them.
  const NgramTree how{max_ngram, min_ngram, 4, 0.8};
  const Tensor found = new_integers({rows, nodes}), parents = new_integers({rows, nodes}), count = new_integers({rows});
  const int64_t *texts = integers(own_tokens), *lengths = integers(own_length);
  int64_t *to = integers(found), *to_parents = integers(parents), *to_count = integers(count);
  run_kernel(
      [=] {
        std::fill_n(to, rows * nodes, int64_t{0});
        std::fill_n(to_parents, rows * nodes, int64_t{0});
        for (int64_t row = 0; row < rows; ++row) {
          to_count[row] = ngram_tree(
              texts + row * capacity, lengths[row], how, to + row * nodes, to_parents + row * nodes, nodes);
        }
      },
      tokens.is_contiguous() && length.is_contiguous());
  return {found, parents, count};
}

std::tuple<Tensor, Tensor, Tensor> match_prediction_op(
    const Tensor& slots, const Tensor& tokens, const Tensor& length, const Tensor& prompt_length,
    const Tensor& prediction, const Tensor& prediction_length, int64_t longest) {
  const Tensor own_slots = side_by_side(slots), own_tokens = side_by_side(tokens), own_length = side_by_side(length);
  const int64_t rows = slots.size(0), capacity = tokens.size(1), places = prediction.size(1);
  Tensor drafts = torch::stable::new_zeros(length, {rows, longest}), lens = new_integers({rows}),
         chances = torch::stable::new_zeros(length, {rows, longest}, ScalarType::Float);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = integers(own_slots)[row], begin = integers(prompt_length)[slot];
    const PredictedRow of{
        integers(own_tokens) + row * capacity + begin, integers(own_length)[row] - begin,
        integers(prediction) + slot * places, integers(prediction_length)[slot]};
    integers(lens)[row] = match_prediction(
        of, longest, integers(drafts) + row * longest, static_cast<float*>(chances.data_ptr()) + row * longest);
  }
  return {drafts, lens, chances};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("ngram_tree", TORCH_BOX(&ngram_tree_op));
  m.impl("accept_commit_", TORCH_BOX(&accept_commit_op));
  m.impl("match_ngram", TORCH_BOX(&match_ngram_op));
  m.impl("match_prediction", TORCH_BOX(&match_prediction_op));
}

}  // namespace
}  // namespace speccompile
