// Linears over rounded weights, which bodies call.
#pragma once

#include <optional>
#include <vector>

#include "../base/ops/linear_ends_of.h"
#include "rounded.h"

namespace speccompile {

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
    const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features);

}  // namespace speccompile
