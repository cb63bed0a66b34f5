// Linears and embeddings over packed weights, as torch sees them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/linear.h"
#include "blocks.h"
#include "kernel_calls.h"
#include "linear_ends_of.h"
#include "ops.h"

namespace speccompile {

namespace {

// A weight of a call, as threads share it out.
struct PackedWeight {
  int64_t blocks;
  Type type;
  const void* packed;
  LinearOutput output;
};

}  // namespace

std::vector<Tensor> fused_packed_linears(
    const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features) {
  LinearCall call = linear_call(x, ends, features);
  std::vector<PackedWeight> weights;
  for (size_t i = 0; i < packed.size(); ++i) {
    STD_TORCH_CHECK(
        packed[i].size(1) == call.input.depth && packed[i].size(2) == kColumns,
        "speccompile::packed_linear: the sizes do not fit");
    if (!biases.empty()) {
      STD_TORCH_CHECK(
          biases[i].scalar_type() == packed[i].scalar_type(),
          "speccompile::packed_linear: weight and bias have different dtypes");
      call.add_bias(i, biases[i]);
    }
    weights.push_back({packed[i].size(0), type_of(packed[i]), packed[i].data_ptr(), call.outputs[i]});
  }
  const Earlies early = early_of(call.input, weights);
  run_kernel(
      [input = call.input, weights = std::move(weights)] {
        const int64_t rows = input.rows, depth = input.depth;
        const auto* from = static_cast<const float*>(input.x);
        if (!input.is_plain()) {
          thread_local std::vector<float> prepared;
          prepared.resize(std::max<size_t>(prepared.size(), rows * depth));
          float* const to = prepared.data();
          over_input_rows(
              input, [=](int64_t row, const float* values) { std::copy_n(values, depth, to + row * depth); });
          from = to;
        }
        over_all_blocks(weights, [=](const PackedWeight& weight, int64_t first, int64_t last) {
          const LinearOutput& output = weight.output;
          linear_blocks(weight.type, from, rows, depth, weight.packed, output.y, output.features, first, last);
          finish_blocks(output, rows, first, last);
        });
      },
      call.repeatable, early);
  return call.results;
}

std::vector<Tensor> packed_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features) {
  return fused_packed_linears(x, {}, packed, biases, features);
}

Tensor prepare_rows(const Tensor& x, const Ends& ends) {
  const LinearCall call = linear_call(x, ends, {});
  const Tensor result = new_tensor({x.sizes().begin(), x.sizes().end()}, dtype_of(x));
  run_kernel(
      [input = call.input, to = static_cast<char*>(result.data_ptr())] {
        const int64_t bytes = input.depth * (input.type == Type::Float ? 4 : 2);
        over_input_rows(input, [=](int64_t row, const float* values) {
          store_row(input.type, values, input.depth, to + row * bytes);
        });
      },
      call.repeatable);
  return result;
}

Tensor join_rows(
    const Tensor& a, const Tensor& norm_a, const Tensor& b, const Tensor& norm_b, double eps, double offset) {
  const LinearCall calls[] = {
      linear_call(a, {std::nullopt, "", norm_a, eps, offset, std::nullopt}, {}),
      linear_call(b, {std::nullopt, "", norm_b, eps, offset, std::nullopt}, {})};
  const LinearInput first = calls[0].input, second = calls[1].input;
  STD_TORCH_CHECK(
      first.type == second.type && first.rows == second.rows, "speccompile::join_rows: the dtypes or rows do not fit");
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = first.depth + second.depth;
  const Tensor result = new_tensor(sizes, dtype_of(a));
  run_kernel(
      [=, to = static_cast<char*>(result.data_ptr())] {
        const int64_t bytes = first.type == Type::Float ? 4 : 2, stride = (first.depth + second.depth) * bytes;
        over_input_rows(first, [=](int64_t row, const float* values) {
          store_row(first.type, values, first.depth, to + row * stride);
        });
        over_input_rows(second, [=](int64_t row, const float* values) {
          store_row(second.type, values, second.depth, to + row * stride + first.depth * bytes);
        });
      },
      calls[0].repeatable && calls[1].repeatable);
  return result;
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
  const Tensor out = new_tensor(sizes, dtype_of(packed));
  const auto* id = static_cast<const int64_t*>(places.data_ptr());
  run_kernel(
      [=, count = places.numel(), blocks = packed.size(0), single = type_of(packed) == Type::Float,
       from_data = packed.data_ptr(), to_data = out.data_ptr()] {
        check_ids(id, count, blocks);
        const auto gather = [&](auto* to, const auto* from) {
          for (int64_t i = 0; i < count; ++i) {
            const auto* column = from + id[i] / kColumns * depth * kColumns + id[i] % kColumns;
            for (int64_t k = 0; k < depth; ++k) {
              *to++ = column[k * kColumns];
            }
          }
        };
        if (single) {
          gather(static_cast<float*>(to_data), static_cast<const float*>(from_data));
        } else {
          gather(static_cast<uint16_t*>(to_data), static_cast<const uint16_t*>(from_data));
        }
      },
      ids.is_contiguous());
  return out;
}

std::vector<Tensor> fused_packed_linears_op(
    const Tensor& x, const std::optional<Tensor>& gate, const std::string& activation, const std::optional<Tensor>& norm,
    double eps, double offset, const std::optional<Tensor>& residual, const std::vector<Tensor>& packed,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  return fused_packed_linears(x, {gate, activation, norm, eps, offset, residual}, packed, biases, features);
}

Tensor prepare_rows_op(
    const Tensor& x, const std::optional<Tensor>& gate, const std::string& activation, const std::optional<Tensor>& norm,
    double eps, double offset) {
  return prepare_rows(x, {gate, activation, norm, eps, offset, std::nullopt});
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_linears", TORCH_BOX(&packed_linears));
  m.impl("prepare_rows", TORCH_BOX(&prepare_rows_op));
  m.impl("join_rows", TORCH_BOX(&join_rows));
  m.impl("fused_packed_linears", TORCH_BOX(&fused_packed_linears_op));
  m.impl("packed_embedding", TORCH_BOX(&packed_embedding));
}

}  // namespace
}  // namespace speccompile
