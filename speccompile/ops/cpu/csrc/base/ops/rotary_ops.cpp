// Cosines and sines of positions, as torch sees them; speccompile/ops/rotary_tables.py defines the op.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <tuple>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

std::tuple<Tensor, Tensor> rotary_tables_op(const Tensor& positions, const Tensor& inv_freq, double scaling) {
  STD_TORCH_CHECK(
      positions.dim() == 2 && inv_freq.dim() == 1 && type_of(inv_freq) == Type::Float,
      "speccompile::native_rotary_tables: positions are [B, T], and frequencies float32 [R / 2]");
  const int64_t rows = positions.size(0), width = positions.size(1), half = inv_freq.size(0);
  const Tensor own = side_by_side(positions), frequencies = side_by_side(inv_freq);
  const Tensor cosines = new_floats({rows, width, 2 * half}), sines = new_floats({rows, width, 2 * half});
  const int64_t* places = integers(own);
  const float* factors = static_cast<const float*>(frequencies.data_ptr());
  float *to_cosines = static_cast<float*>(cosines.data_ptr()), *to_sines = static_cast<float*>(sines.data_ptr());
  run_kernel(
      [=, scale = static_cast<float>(scaling)] {
        for (int64_t i = 0; i < rows * width; ++i) {
          float *cosine = to_cosines + 2 * half * i, *sine = to_sines + 2 * half * i;
          for (int64_t j = 0; j < half; ++j) {
            const float angle = static_cast<float>(places[i]) * factors[j];
            cosine[j] = cosine[half + j] = std::cos(angle) * scale;
            sine[j] = sine[half + j] = std::sin(angle) * scale;
          }
        }
      },
      positions.is_contiguous() && inv_freq.is_contiguous());
  return {cosines, sines};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_rotary_tables", TORCH_BOX(&rotary_tables_op));
}

}  // namespace
}  // namespace speccompile
