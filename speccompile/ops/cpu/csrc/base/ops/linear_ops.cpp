// Linears and embeddings over packed weights, as torch sees them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../kernels/linear.h"
#include "blocks.h"
#include "ops.h"

namespace speccompile {

namespace {

// A weight of a call, as threads share it out.
struct PackedWeight {
  int64_t blocks;
  Type type;
  const void* packed;
  const void* bias;
  float* y;
  int64_t features;
};

}  // namespace

std::vector<Tensor> packed_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features) {
  const int64_t depth = x.size(-1), rows = x.numel() / depth;
  for (const Tensor& weight : packed) {
    STD_TORCH_CHECK(
        weight.size(1) == depth && weight.size(2) == kColumns, "speccompile::packed_linear: the sizes do not fit");
  }
  std::vector<Tensor> added;
  for (size_t i = 0; i < biases.size(); ++i) {
    STD_TORCH_CHECK(
        biases[i].scalar_type() == packed[i].scalar_type(),
        "speccompile::packed_linear: weight and bias have different dtypes");
    added.push_back(side_by_side(biases[i]));
  }
  const Tensor input = side_by_side(as_float(x));
  const std::vector<Tensor> outputs = new_outputs(x, features);
  std::vector<PackedWeight> weights;
  for (size_t i = 0; i < packed.size(); ++i) {
    weights.push_back(
        {packed[i].size(0), type_of(packed[i]), packed[i].data_ptr(), added.empty() ? nullptr : added[i].data_ptr(),
         static_cast<float*>(outputs[i].data_ptr()), features[i]});
  }
  const auto* from = static_cast<const float*>(input.data_ptr());
  over_all_blocks(weights, [=](const PackedWeight& weight, int64_t first, int64_t last) {
    linear_blocks(weight.type, from, rows, depth, weight.packed, weight.bias, weight.y, weight.features, first, last);
  });
  return as_dtype(outputs, x.scalar_type());
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features) {
  return packed_linears(x, {packed}, bias ? std::vector<Tensor>{*bias} : std::vector<Tensor>{}, {features})[0];
}

namespace {

Tensor packed_embedding(const Tensor& packed, const Tensor& ids) {
  const int64_t depth = packed.size(1);
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(depth);
  const Tensor places = side_by_side(ids);
  check_ids(places, packed.size(0));
  Tensor out = torch::stable::new_empty(packed, sizes);
  const auto* id = static_cast<const int64_t*>(places.data_ptr());
  const auto gather = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < places.numel(); ++i) {
      const auto* column = from + id[i] / kColumns * depth * kColumns + id[i] % kColumns;
      for (int64_t k = 0; k < depth; ++k) {
        *to++ = column[k * kColumns];
      }
    }
  };
  if (type_of(packed) == Type::Float) {
    gather(static_cast<float*>(out.data_ptr()), static_cast<const float*>(packed.data_ptr()));
  } else {
    gather(static_cast<uint16_t*>(out.data_ptr()), static_cast<const uint16_t*>(packed.data_ptr()));
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_linears", TORCH_BOX(&packed_linears));
  m.impl("packed_embedding", TORCH_BOX(&packed_embedding));
}

}  // namespace
}  // namespace speccompile
