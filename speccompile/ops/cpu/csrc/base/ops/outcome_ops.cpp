// The results of a run for the host, as torch sees the op; speccompile/ops/pack_outcomes.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "state_tensors.h"

namespace speccompile {
namespace {

// The bits of its float64.
int64_t bits(float value) {
  const double wide = value;
  int64_t found;
  std::memcpy(&found, &wide, sizeof found);
  return found;
}

Tensor pack_outcomes_op(
    const Tensor& emitted, const Tensor& accepted, const Tensor& proposed, const Tensor& alive, const Tensor& length,
    const Tensor& tokens, int64_t width, const std::vector<Tensor>& others) {
  const int64_t slots = emitted.numel(), capacity = tokens.size(1);
  int64_t columns = 4 + width;
  for (const Tensor& other : others) {
    STD_TORCH_CHECK(
        other.size(0) == slots && other.is_contiguous(), "speccompile::pack_outcomes: the sizes do not fit");
    columns += other.numel() / slots;
  }
  const Tensor packed = new_integers({columns, slots});
  const int64_t *counts[] = {integers(emitted), integers(accepted), integers(proposed)}, *lengths = integers(length);
  const int64_t* texts = integers(tokens);
  const bool* living = flags(alive);
  int64_t* to = integers(packed);
  for (const int64_t* column : counts) {
    to = std::copy_n(column, slots, to);
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    *to++ = living[slot];
  }
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      *to++ = texts[slot * capacity + lengths[slot] - counts[0][slot] + i];
    }
  }
  for (const Tensor& other : others) {
    const int64_t count = other.numel() / slots;
    const bool scores = other.scalar_type() == ScalarType::Float;
    const int64_t* whole = scores ? nullptr : integers(other);
    const float* parts = scores ? static_cast<const float*>(other.data_ptr()) : nullptr;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        *to++ = scores ? bits(parts[slot * count + i]) : whole[slot * count + i];
      }
    }
  }
  return packed;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("pack_outcomes", TORCH_BOX(&pack_outcomes_op));
}

}  // namespace
}  // namespace speccompile
