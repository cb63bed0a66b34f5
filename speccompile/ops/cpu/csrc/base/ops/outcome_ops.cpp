// The results of a run for the host, as torch sees the op; speccompile/ops/pack_outcomes.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernel_calls.h"
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

// One of the other tensors: numbers, or floats.
struct Other {
  const int64_t* numbers;
  const float* floats;
  int64_t count;
};

Tensor pack_outcomes_op(
    const Tensor& emitted, const Tensor& accepted, const Tensor& proposed, const Tensor& alive, const Tensor& length,
    const Tensor& tokens, int64_t width, const std::vector<Tensor>& others) {
  const int64_t slots = emitted.numel(), capacity = tokens.size(1);
  int64_t columns = 4 + width;
  std::vector<Other> rest;
  for (const Tensor& other : others) {
    STD_TORCH_CHECK(
        other.size(0) == slots && other.is_contiguous(), "speccompile::pack_outcomes: the sizes do not fit");
    const bool floats = other.scalar_type() == ScalarType::Float;
    rest.push_back(
        {floats ? nullptr : integers(other), floats ? static_cast<const float*>(other.data_ptr()) : nullptr,
         other.numel() / slots});
    columns += rest.back().count;
  }
  const Tensor packed = new_integers({columns, slots});
  const int64_t *of_emitted = integers(emitted), *of_accepted = integers(accepted), *of_proposed = integers(proposed);
  const int64_t *lengths = integers(length), *texts = integers(tokens);
  const bool* living = flags(alive);
  int64_t* first = integers(packed);
  run_kernel([=] {
    int64_t* to = first;
    for (const int64_t* column : {of_emitted, of_accepted, of_proposed}) {
      to = std::copy_n(column, slots, to);
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
      *to++ = living[slot];
    }
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        *to++ = texts[slot * capacity + lengths[slot] - of_emitted[slot] + i];
      }
    }
    for (const Other& other : rest) {
      for (int64_t i = 0; i < other.count; ++i) {
        for (int64_t slot = 0; slot < slots; ++slot) {
          const int64_t at = slot * other.count + i;
          *to++ = other.floats ? bits(other.floats[at]) : other.numbers[at];
        }
      }
    }
  });
  return packed;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("pack_outcomes", TORCH_BOX(&pack_outcomes_op));
}

}  // namespace
}  // namespace speccompile
