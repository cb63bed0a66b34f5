// The ops that bodies call.
#pragma once

#include <optional>
#include <vector>

#include "../kernels/rounded.h"
#include "tensors.h"

namespace speccompile {

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features);
std::vector<Tensor> packed_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features);

// A form of rounded weights, as its tensors have it: numbers in a line of `packed`.
struct RoundedWeight {
  const char* name;
  const RoundedForm& kernel;
  int64_t numbers;
};
extern const RoundedWeight int8_weight, int4_weight;

template <const RoundedWeight& form>
Tensor rounded_linear(
    const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias, int64_t features);
template <const RoundedWeight& form>
std::vector<Tensor> rounded_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features);

Tensor native_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& positions,
    double scale, const std::optional<int64_t>& window, const std::optional<int64_t>& chunk,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents);
Tensor native_expert_linear(
    const Tensor& x, const Tensor& experts, const Tensor& weight, const std::optional<Tensor>& bias, bool transposed);
std::vector<Tensor> native_lora(
    const Tensor& x, const std::vector<Tensor>& outputs, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
    const Tensor& ranks, const Tensor& scales, int64_t first, const Tensor& places);

}  // namespace speccompile
