// Linears and embeddings over rounded weights, as torch sees them.
#include "rounded_ops.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "../base/ops/blocks.h"

namespace speccompile {

Scales scales_of(const RoundedWeight& form, const Tensor& packed, const Tensor& scales, int64_t groups) {
  const bool minimums = scales.dim() == 4, in_steps = scales.scalar_type() == ScalarType::Byte;
  // Of a float16 for each column, and numbers of rows that share it.
  const int64_t line = scales.size(-1), steps = in_steps ? line / kColumns - 2 : 1, rows = scales.size(1) * steps;
  STD_TORCH_CHECK(
      form.kernel.fits(groups, rows) && (!minimums || form.kernel.minimums) && packed.size(1) * 4 == groups * kGroup &&
          packed.size(0) == scales.size(0) && packed.size(2) == form.numbers && (!minimums || scales.size(2) == 2) &&
          line == (in_steps ? (steps + 2) * kColumns : kColumns) && scales.is_contiguous(),
      "speccompile::", form.name, "_linear: the sizes do not fit");
  const ScalarType type = scales.scalar_type();
  STD_TORCH_CHECK(
      in_steps || type == ScalarType::Half || type == ScalarType::Float, "speccompile::", form.name,
      "_linear: scales are of float32, float16 or bytes");
  const ScaleKind kind = in_steps ? ScaleKind::Steps : type == ScalarType::Half ? ScaleKind::Half : ScaleKind::Single;
  return {scales.data_ptr(), rows, kind, steps, minimums};
}

namespace {

// A weight of a call, as threads share it out.
struct SharedWeight {
  int64_t blocks;
  const void* packed;
  Scales scales;
  LinearOutput output;
};

std::vector<Tensor> linears_of(
    const RoundedWeight& form, const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed,
    const std::vector<Tensor>& scales, const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  LinearCall call = linear_call(x, ends, features);
  const int64_t groups = groups_of(call.input.depth);
  std::vector<SharedWeight> weights;
  for (size_t i = 0; i < packed.size(); ++i) {
    if (!biases.empty()) {
      call.add_bias(i, biases[i]);
    }
    weights.push_back(
        {packed[i].size(0), packed[i].data_ptr(), scales_of(form, packed[i], scales[i], groups), call.outputs[i]});
  }
  const Earlies early = early_of(call.input, weights);
  run_kernel(
      [&kernel = form.kernel, groups, input = call.input, weights = std::move(weights)] {
        const int64_t rows = input.rows, depth = input.depth, row_bytes = kernel.input_bytes(groups);
        thread_local std::vector<uint8_t> inputs;
        thread_local std::vector<float> input_scales;
        inputs.resize(std::max<size_t>(inputs.size(), rows * row_bytes));
        input_scales.resize(std::max<size_t>(input_scales.size(), rows * groups));
        auto* const q = inputs.data();
        auto* const q_scales = input_scales.data();
        over_input_rows(input, [=, round = kernel.round_inputs](int64_t row, const float* values) {
          round(values, depth, groups, q + row * row_bytes, q_scales + row * groups);
        });
        over_all_blocks(weights, [=, blocks = kernel.blocks](const SharedWeight& weight, int64_t first, int64_t last) {
          const LinearOutput& output = weight.output;
          blocks(
              q, q_scales, rows, groups, weight.packed, weight.scales, output.y, output.features, first, last);
          finish_blocks(output, rows, first, last);
        });
      },
      call.repeatable, early);
  return call.results;
}

}  // namespace

const RoundedWeight int8_weight{"int8", kInt8, 32}, int4_weight{"int4", kInt4, 16}, fp4_weight{"fp4", kFp4, 16};

template <const RoundedWeight& form>
std::vector<Tensor> rounded_linears(
    const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  return linears_of(form, x, ends, packed, scales, biases, features);
}

template <const RoundedWeight& form>
Tensor rounded_linear(
    const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias, int64_t features) {
  return linears_of(
      form, x, {}, {packed}, {scales}, bias ? std::vector<Tensor>{*bias} : std::vector<Tensor>{}, {features})[0];
}

// What shims of a form call.
#define ROUNDED_LINEARS(FORM)                                                                                          \
  template Tensor rounded_linear<FORM##_weight>(                                                                       \
      const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);                             \
  template std::vector<Tensor> rounded_linears<FORM##_weight>(                                                         \
      const Tensor&, const Ends&, const std::vector<Tensor>&, const std::vector<Tensor>&, const std::vector<Tensor>&,  \
      const std::vector<int64_t>&);

ROUNDED_LINEARS(int8)
ROUNDED_LINEARS(int4)
ROUNDED_LINEARS(fp4)

namespace {

template <const RoundedWeight& form>
std::vector<Tensor> plain_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  return linears_of(form, x, {}, packed, scales, biases, features);
}

template <const RoundedWeight& form>
std::vector<Tensor> fused_linears(
    const Tensor& x, const std::optional<Tensor>& gate, const std::string& activation, const std::optional<Tensor>& norm,
    double eps, double offset, const std::optional<Tensor>& residual, const std::vector<Tensor>& packed,
    const std::vector<Tensor>& scales, const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  return linears_of(form, x, {gate, activation, norm, eps, offset, residual}, packed, scales, biases, features);
}

template <const RoundedWeight& form>
Tensor rounded_embedding(const Tensor& packed, const Tensor& scales, const Tensor& ids, int64_t depth) {
  const Scales units = scales_of(form, packed, scales, groups_of(depth));
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(depth);
  const Tensor places = side_by_side(ids);
  const Tensor out = new_floats(sizes);
  run_kernel(
      [=, id = static_cast<const int64_t*>(places.data_ptr()), count = places.numel(), blocks = packed.size(0),
       weight = packed.data_ptr(), to = static_cast<float*>(out.data_ptr())] {
        check_ids(id, count, blocks);
        for (int64_t i = 0; i < count; ++i) {
          form.kernel.weight_row(id[i], depth, groups_of(depth), weight, units, to + i * depth);
        }
      },
      ids.is_contiguous());
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("int8_linears", TORCH_BOX(&plain_linears<int8_weight>));
  m.impl("fused_int8_linears", TORCH_BOX(&fused_linears<int8_weight>));
  m.impl("int8_linear", TORCH_BOX(&rounded_linear<int8_weight>));
  m.impl("int8_embedding", TORCH_BOX(&rounded_embedding<int8_weight>));
  m.impl("int4_linears", TORCH_BOX(&plain_linears<int4_weight>));
  m.impl("fused_int4_linears", TORCH_BOX(&fused_linears<int4_weight>));
  m.impl("int4_linear", TORCH_BOX(&rounded_linear<int4_weight>));
  m.impl("int4_embedding", TORCH_BOX(&rounded_embedding<int4_weight>));
  m.impl("fp4_linears", TORCH_BOX(&plain_linears<fp4_weight>));
  m.impl("fused_fp4_linears", TORCH_BOX(&fused_linears<fp4_weight>));
  m.impl("fp4_linear", TORCH_BOX(&rounded_linear<fp4_weight>));
  m.impl("fp4_embedding", TORCH_BOX(&rounded_embedding<fp4_weight>));
}

}  // namespace
}  // namespace speccompile
