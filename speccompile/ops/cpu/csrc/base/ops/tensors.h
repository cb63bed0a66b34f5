// Tensors for ops, made without asking torch's dispatcher: that takes longer than a short op.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "../kernels/linear.h"

namespace speccompile {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Tensor side_by_side(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor new_tensor(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline Tensor new_floats(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_float32());
}

inline Tensor new_integers(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_int64());
}

inline Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Type::Float;
    case ScalarType::BFloat16:
      return Type::BFloat16;
    case ScalarType::Half:
      return Type::Half;
    default:
      STD_TORCH_CHECK(false, "speccompile's CPU ops take float32, bfloat16 and float16");
  }
}

inline int32_t dtype_of(const Tensor& tensor) {
  switch (type_of(tensor)) {
    case Type::Float:
      return aoti_torch_dtype_float32();
    case Type::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case Type::Half:
      return aoti_torch_dtype_float16();
  }
}

inline Tensor as_float(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float);
}

}  // namespace speccompile
