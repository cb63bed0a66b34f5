// The ends of a linear (kernels/linear_ends.h) from the tensors of an op.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../kernels/linear_ends.h"
#include "kernel_calls.h"
#include "tensors.h"

namespace speccompile {

// Arguments of an op that fuses a linear with what is around it: speccompile/ops/native.py.
struct Ends {
  std::optional<Tensor> gate;
  std::string_view activation;
  std::optional<Tensor> norm;
  double eps = 0, offset = 0;
  std::optional<Tensor> residual;

  bool is_empty() const { return !gate && !norm && !residual; }
};

inline Activation activation_of(std::string_view name) {
  if (name == "silu") {
    return Activation::Silu;
  }
  if (name == "gelu") {
    return Activation::Gelu;
  }
  if (name == "gelu_tanh") {
    return Activation::GeluTanh;
  }
  STD_TORCH_CHECK(name.empty(), "speccompile: a linear has no gate of the activation ", std::string(name));
  return Activation::None;
}

// A call of linears over the rows of x, as its kernel takes it.
struct LinearCall {
  LinearInput input;
  std::vector<LinearOutput> outputs;
  std::vector<Tensor> results;
  // Whether it can be run again: no tensor was copied.
  bool repeatable;
  // Adds `bias` to output `i`.
  void add_bias(size_t i, const Tensor& bias) {
    STD_TORCH_CHECK(bias.numel() == outputs[i].features, "speccompile: a linear's bias has another size than its output");
    kept.push_back(side_by_side(bias));
    repeatable &= bias.is_contiguous();
    outputs[i].bias_type = type_of(bias);
    outputs[i].bias = kept.back().data_ptr();
  }

  // They own what the first call reads and writes beside the op's arguments and results.
  std::vector<Tensor> kept;
};

inline LinearCall linear_call(const Tensor& x, const Ends& ends, const std::vector<int64_t>& features) {
  LinearCall call{};
  call.repeatable = true;
  const auto address = [&](const Tensor& tensor, int64_t size) -> const void* {
    STD_TORCH_CHECK(
        tensor.scalar_type() == x.scalar_type() && tensor.numel() == size,
        "speccompile: a linear's norm, gate and residual have the dtype and the sizes of its input or output");
    call.kept.push_back(side_by_side(tensor));
    call.repeatable &= tensor.is_contiguous();
    return call.kept.back().data_ptr();
  };
  LinearInput& input = call.input;
  input.type = type_of(x);
  input.depth = x.size(-1);
  input.rows = x.numel() / input.depth;
  input.x = address(x, x.numel());
  input.norm = ends.norm ? address(*ends.norm, input.depth) : nullptr;
  input.eps = static_cast<float>(ends.eps);
  input.offset = static_cast<float>(ends.offset);
  input.gate = ends.gate ? address(*ends.gate, x.numel()) : nullptr;
  input.activation = activation_of(ends.activation);
  STD_TORCH_CHECK(
      !ends.residual || features.size() == 1, "speccompile: a residual is added to the output of one linear");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (const int64_t count : features) {
    sizes.back() = count;
    const Tensor y = new_floats(sizes);
    const Tensor result = input.type == Type::Float ? y : new_tensor(sizes, dtype_of(x));
    call.outputs.push_back(
        {input.type, count, static_cast<float*>(y.data_ptr()), result.data_ptr(),
         ends.residual ? address(*ends.residual, input.rows * count) : nullptr, Type::Float, nullptr});
    call.kept.push_back(y);
    call.results.push_back(result);
  }
  return call;
}

// What linears over `weights` read first: what a call knows of them, the norm, and where the weights begin, from which on
// the hardware fetches ahead.
template <typename Weight>
Earlies early_of(const LinearInput& input, const std::vector<Weight>& weights) {
  constexpr int64_t kBeginning = 2048;
  const int64_t norm = input.depth * (input.type == Type::Float ? 4 : 2);
  return {{
      {weights.data(), static_cast<int64_t>(weights.size() * sizeof(Weight))},
      {input.norm, input.norm ? norm : 0},
      {weights[0].packed, kBeginning},
  }};
}

// Numbers of a row that a thread prepares before it takes the next row.
constexpr int64_t kPrepared = 1024;

// Calls `use(row, values)` for each row of the input, from several threads.
template <typename Use>
void over_input_rows(const LinearInput& input, const Use& use) {
  const int64_t depth = input.depth;
  parallel_for(0, input.rows, std::max<int64_t>(kPrepared / depth, 1), [&](int64_t first, int64_t last) {
    thread_local std::vector<float> values;
    values.resize(std::max<size_t>(values.size(), depth));
    for (int64_t row = first; row < last; ++row) {
      if (input.is_plain()) {
        use(row, static_cast<const float*>(input.x) + row * depth);
      } else {
        linear_input_row(input, row, values.data());
        use(row, values.data());
      }
    }
  });
}

}  // namespace speccompile
