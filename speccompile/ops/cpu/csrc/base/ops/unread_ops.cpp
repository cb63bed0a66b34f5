// What a drafter has not read yet, as torch sees it; speccompile/ops/unread_rows.py defines the ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

int64_t bytes_of_row(const Tensor& tensor) { return tensor.size(2) * (type_of(tensor) == Type::Float ? 4 : 2); }

void keep_unread_op(Tensor kept, const Tensor& slots, const Tensor& positions, const Tensor& hidden) {
  const int64_t rows = hidden.size(0), width = hidden.size(1), places = kept.size(1);
  STD_TORCH_CHECK(
      kept.scalar_type() == hidden.scalar_type() && kept.is_contiguous() && kept.size(2) == hidden.size(2) &&
          slots.numel() == rows && positions.size(0) == rows && positions.size(1) == width && width <= places,
      "speccompile::keep_unread_: the sizes or dtypes do not fit");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(positions), given = side_by_side(hidden);
  const int64_t bytes = bytes_of_row(hidden);
  const int64_t *slot_of = integers(own_slots), *position_of = integers(own);
  const char* from = static_cast<const char*>(given.data_ptr());
  char* to = static_cast<char*>(kept.data_ptr());
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t at = slot_of[i / width] * places + position_of[i] % places;
          std::memcpy(to + at * bytes, from + i * bytes, bytes);
        }
      },
      slots.is_contiguous() && positions.is_contiguous() && hidden.is_contiguous());
}

std::tuple<Tensor, Tensor, Tensor> unread_rows_op(
    const Tensor& kept, const Tensor& read_len, const Tensor& tokens, const Tensor& slots, int64_t width) {
  const int64_t rows = slots.numel(), places = kept.size(1), capacity = tokens.size(1);
  STD_TORCH_CHECK(kept.is_contiguous(), "speccompile::unread_rows: the hidden states are side by side");
  const Tensor own_slots = side_by_side(slots);
  const Tensor next = new_integers({rows, width}), positions = new_integers({rows, width});
  const Tensor hidden = new_tensor({rows, width, kept.size(2)}, dtype_of(kept));
  const int64_t bytes = bytes_of_row(kept);
  const int64_t *slot_of = integers(own_slots), *read = integers(read_len), *texts = integers(tokens);
  const char* from = static_cast<const char*>(kept.data_ptr());
  char* to = static_cast<char*>(hidden.data_ptr());
  int64_t *to_next = integers(next), *to_positions = integers(positions);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t slot = slot_of[i / width], at = std::min(read[slot] + i % width, capacity - 1);
          to_positions[i] = at;
          to_next[i] = texts[slot * capacity + std::min(at + 1, capacity - 1)];
          std::memcpy(to + i * bytes, from + (slot * places + at % places) * bytes, bytes);
        }
      },
      slots.is_contiguous());
  return {next, positions, hidden};
}

std::tuple<Tensor, Tensor> unread_tokens_op(
    const Tensor& read_len, const Tensor& tokens, const Tensor& slots, int64_t width) {
  const int64_t rows = slots.numel(), capacity = tokens.size(1);
  const Tensor own_slots = side_by_side(slots);
  const Tensor next = new_integers({rows, width}), positions = new_integers({rows, width});
  const int64_t *slot_of = integers(own_slots), *read = integers(read_len), *texts = integers(tokens);
  int64_t *to_next = integers(next), *to_positions = integers(positions);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t slot = slot_of[i / width], at = std::min(read[slot] + i % width, capacity - 1);
          to_positions[i] = at;
          to_next[i] = texts[slot * capacity + at];
        }
      },
      slots.is_contiguous());
  return {next, positions};
}

void note_read_op(Tensor read_len, const Tensor& length, const Tensor& slots, int64_t width) {
  const int64_t rows = slots.numel();
  const Tensor own_slots = side_by_side(slots);
  const int64_t *slot_of = integers(own_slots), *lengths = integers(length);
  int64_t* read = integers(read_len);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row];
          read[slot] = std::max(read[slot], std::min(read[slot] + width, lengths[slot] - 1));
        }
      },
      slots.is_contiguous());
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("keep_unread_", TORCH_BOX(&keep_unread_op));
  m.impl("unread_rows", TORCH_BOX(&unread_rows_op));
  m.impl("unread_tokens", TORCH_BOX(&unread_tokens_op));
  m.impl("note_read_", TORCH_BOX(&note_read_op));
}

}  // namespace
}  // namespace speccompile
