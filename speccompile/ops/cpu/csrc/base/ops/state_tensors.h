// State and results of a step's own ops: contiguous, of int64, float32 or bool.
#pragma once

#include "tensors.h"

namespace speccompile {

inline int64_t* integers(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(),
      "speccompile: a step's rows and slots are int64, side by side");
  return static_cast<int64_t*>(tensor.data_ptr());
}

inline const float* floats(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(),
      "speccompile: options and scores of slots are float32, side by side");
  return static_cast<const float*>(tensor.data_ptr());
}

inline bool* flags(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Bool && tensor.is_contiguous(),
      "speccompile: what says which rows are alive or ready is bool, side by side");
  return static_cast<bool*>(tensor.data_ptr());
}

}  // namespace speccompile
