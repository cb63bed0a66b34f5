// What rows read at the start of a step and keep at its end, as torch sees it; speccompile/ops/step_inputs.py,
// row_contexts.py and store_drafts.py define it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> step_inputs_op(
    const Tensor& tokens, const Tensor& length, const Tensor& slots, const std::optional<Tensor>& drafts,
    const std::optional<Tensor>& draft_lens, const std::optional<Tensor>& limit, const std::optional<Tensor>& draft_limit,
    int64_t draft_len, int64_t width, int64_t vocab_size) {
  const int64_t rows = slots.size(0), capacity = tokens.size(1);
  const Tensor own_slots = side_by_side(slots);
  // Any tensor stands in for those that are not there.
  const Tensor given = side_by_side(drafts.value_or(slots)), given_lens = side_by_side(draft_lens.value_or(slots));
  const bool drafted = drafts && draft_lens, of_state = limit.has_value();
  const int64_t stride = drafted ? given.size(1) : 0;
  STD_TORCH_CHECK(
      width > draft_len && (!drafted || (stride >= draft_len && (of_state || given.size(0) == rows))),
      "speccompile::step_inputs: the sizes do not fit");
  const int64_t *texts = integers(tokens), *lengths = integers(length), *slot_of = integers(own_slots);
  const int64_t *drafts_of = integers(given), *lens_of = integers(given_lens);
  const int64_t *limits = of_state ? integers(*limit) : nullptr, *most = draft_limit ? integers(*draft_limit) : nullptr;
  const Tensor own = new_integers({rows, draft_len}), lens = new_integers({rows}), read = new_integers({rows, width}),
               positions = new_integers({rows, width});
  int64_t *to_drafts = integers(own), *to_lens = integers(lens), *to_read = integers(read), *to_places = integers(positions);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], from = of_state ? slot : row;
          const int64_t newest_at = std::max<int64_t>(lengths[slot] - 1, 0);
          const int64_t newest = texts[slot * capacity + newest_at];
          int64_t count = drafted ? lens_of[from] : 0;
          if (of_state) {
            count = std::max<int64_t>(std::min(std::min(count, draft_len), limits[slot] - lengths[slot] - 1), 0);
          }
          if (most) {
            count = std::min(count, most[slot]);
          }
          to_lens[row] = count;
          for (int64_t i = 0; i < draft_len; ++i) {
            to_drafts[row * draft_len + i] = drafted && i < count ? drafts_of[from * stride + i] : -1;
          }
          for (int64_t i = 0; i < width; ++i) {
            const int64_t draft = i > 0 && i <= draft_len ? to_drafts[row * draft_len + i - 1] : -1;
            to_read[row * width + i] = draft >= 0 && draft < vocab_size ? draft : newest;
            to_places[row * width + i] = newest_at + i;
          }
        }
      },
      slots.is_contiguous() && given.data_ptr() == drafts.value_or(slots).data_ptr() &&
          given_lens.data_ptr() == draft_lens.value_or(slots).data_ptr());
  return {own, lens, read, positions};
}

std::tuple<Tensor, Tensor> row_contexts_op(
    const Tensor& tokens, const Tensor& length, const Tensor& slots, const Tensor& drafts) {
  const int64_t rows = slots.size(0), capacity = tokens.size(1), count = drafts.size(1);
  STD_TORCH_CHECK(drafts.size(0) == rows, "speccompile::row_contexts: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), given = side_by_side(drafts);
  const int64_t *texts = integers(tokens), *lengths = integers(length), *slot_of = integers(own_slots),
                *drafts_of = integers(given);
  const Tensor context = new_integers({rows, capacity}), row_length = new_integers({rows});
  int64_t *to = integers(context), *to_length = integers(row_length);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row];
          std::copy_n(texts + slot * capacity, capacity, to + row * capacity);
          to_length[row] = lengths[slot];
          for (int64_t i = 0; i < count; ++i) {
            to[row * capacity + std::min(lengths[slot] + i, capacity - 1)] = drafts_of[row * count + i];
          }
        }
      },
      slots.is_contiguous() && drafts.is_contiguous());
  return {context, row_length};
}

void store_drafts_op(
    Tensor draft_tokens, Tensor draft_lens, const Tensor& length, const Tensor& limit, const Tensor& slots,
    const Tensor& drafts, const Tensor& lens) {
  const Tensor own_slots = side_by_side(slots), given = side_by_side(drafts), given_lens = side_by_side(lens);
  const int64_t rows = slots.size(0), longest = draft_tokens.size(1);
  STD_TORCH_CHECK(
      given.size(0) == rows && given.size(1) == longest && given_lens.numel() == rows,
      "speccompile::store_drafts_: the sizes do not fit");
  const int64_t *slot_of = integers(own_slots), *found = integers(given), *counts = integers(given_lens);
  const int64_t *lengths = integers(length), *limits = integers(limit);
  int64_t *to = integers(draft_tokens), *to_lens = integers(draft_lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], useful = limits[slot] - lengths[slot] - 1;
          std::copy_n(found + row * longest, longest, to + slot * longest);
          to_lens[slot] = std::max<int64_t>(std::min(std::min(counts[row], longest), useful), 0);
        }
      },
      slots.is_contiguous() && drafts.is_contiguous() && lens.is_contiguous());
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("step_inputs", TORCH_BOX(&step_inputs_op));
  m.impl("row_contexts", TORCH_BOX(&row_contexts_op));
  m.impl("store_drafts_", TORCH_BOX(&store_drafts_op));
}

}  // namespace
}  // namespace speccompile
