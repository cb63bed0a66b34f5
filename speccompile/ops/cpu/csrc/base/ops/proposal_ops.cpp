// Choice among the proposals of several drafters, as torch sees it; speccompile/ops/proposals.py defines the ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

using Proposals = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Proposals take_passing_op(
    const Tensor& drafts, const Tensor& lens, const std::optional<Tensor>& scores,
    const std::optional<Tensor>& other_drafts, const std::optional<Tensor>& other_lens,
    const std::optional<Tensor>& other_scores, const std::optional<Tensor>& other_by, int64_t by, double least,
    bool always) {
  const int64_t rows = drafts.size(0), width = drafts.size(1);
  const bool others = other_drafts && other_lens && other_scores && other_by;
  STD_TORCH_CHECK(
      lens.numel() == rows && (!scores || scores->numel() == rows * width) &&
          (!others || (other_drafts->numel() == rows * width && other_by->numel() == rows)),
      "speccompile::take_passing: the sizes do not fit");
  const Proposals results{
      new_integers({rows, width}), new_integers({rows}), new_floats({rows, width}), new_integers({rows})};
  const int64_t *from = integers(drafts), *counts = integers(lens);
  const float* chances = scores ? floats(*scores) : nullptr;
  const int64_t *from_others = others ? integers(*other_drafts) : nullptr;
  const int64_t *counts_of_others = others ? integers(*other_lens) : nullptr;
  const float* chances_of_others = others ? floats(*other_scores) : nullptr;
  const int64_t* by_of_others = others ? integers(*other_by) : nullptr;
  int64_t *to = integers(std::get<0>(results)), *to_lens = integers(std::get<1>(results));
  float* to_scores = static_cast<float*>(std::get<2>(results).data_ptr());
  int64_t* to_by = integers(std::get<3>(results));
  run_kernel([=] {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = row * width;
      double expected = 0.0;
      for (int64_t i = 0; chances && i < std::min(counts[row], width); ++i) {
        expected += chances[first + i];
      }
      const bool passes = always || (counts[row] > 0 && (!chances || expected >= least));
      const bool take = passes || !others;
      std::copy_n((take ? from : from_others) + first, width, to + first);
      to_lens[row] = passes ? counts[row] : others ? counts_of_others[row] : 0;
      to_by[row] = passes ? by : others ? by_of_others[row] : by + 1;
      if (take && !chances) {
        std::fill_n(to_scores + first, width, 1.0f);
      } else {
        std::copy_n((take ? chances : chances_of_others) + first, width, to_scores + first);
      }
    }
  });
  return results;
}

std::tuple<Tensor, Tensor> proposed_or_stored_op(
    const Tensor& draft_tokens, const Tensor& draft_lens, const Tensor& stored_drafts, const Tensor& stored_lens,
    const Tensor& length, const Tensor& limit, const Tensor& slots, int64_t draft_len) {
  const int64_t rows = slots.numel(), longest = draft_tokens.size(1);
  STD_TORCH_CHECK(
      stored_drafts.size(1) == longest && draft_len <= longest,
      "speccompile::proposed_or_stored: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), drafts = new_integers({rows, draft_len}), lens = new_integers({rows});
  const int64_t *slot_of = integers(own_slots), *proposed = integers(draft_tokens), *stored = integers(stored_drafts);
  const int64_t *proposed_counts = integers(draft_lens), *stored_counts = integers(stored_lens);
  const int64_t *lengths = integers(length), *limits = integers(limit);
  int64_t *to = integers(drafts), *to_lens = integers(lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], possible = std::max<int64_t>(limits[slot] - lengths[slot] - 1, 0);
          const bool has = proposed_counts[slot] > 0;
          const int64_t* from = (has ? proposed : stored) + slot * longest;
          const int64_t count = std::min(has ? proposed_counts[slot] : stored_counts[slot], draft_len);
          to_lens[row] = std::min(count, possible);
          for (int64_t i = 0; i < draft_len; ++i) {
            to[row * draft_len + i] = i < to_lens[row] ? from[i] : -1;
          }
        }
      },
      slots.is_contiguous());
  return {drafts, lens};
}

void store_rows_op(Tensor kept, const Tensor& slots, const Tensor& values) {
  const int64_t rows = slots.numel(), width = rows ? values.numel() / rows : 0;
  STD_TORCH_CHECK(
      kept.scalar_type() == values.scalar_type() && kept.is_contiguous() && values.size(0) == rows &&
          kept.numel() == kept.size(0) * width,
      "speccompile::store_rows_: the sizes or dtypes do not fit");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(values);
  const int64_t bytes = width * (values.scalar_type() == ScalarType::Long ? 8 : 4);
  STD_TORCH_CHECK(
      values.scalar_type() == ScalarType::Long || values.scalar_type() == ScalarType::Float,
      "speccompile::store_rows_ takes int64 and float32");
  const int64_t* slot_of = integers(own_slots);
  const char* from = static_cast<const char*>(own.data_ptr());
  char* to = static_cast<char*>(kept.data_ptr());
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          std::memcpy(to + slot_of[row] * bytes, from + row * bytes, bytes);
        }
      },
      slots.is_contiguous() && values.is_contiguous());
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("take_passing", TORCH_BOX(&take_passing_op));
  m.impl("proposed_or_stored", TORCH_BOX(&proposed_or_stored_op));
  m.impl("store_rows_", TORCH_BOX(&store_rows_op));
}

}  // namespace
}  // namespace speccompile
