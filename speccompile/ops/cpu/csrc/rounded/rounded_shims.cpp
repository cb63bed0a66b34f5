#include "../base/ops/shims.h"
#include "rounded_ops.h"

namespace speccompile {
namespace {

template <const RoundedWeight& form>
AOTITorchError rounded_linear_shim(
    const char* name, Handle x, Handle packed, Handle scales, const Handle* bias, int64_t features, Handle* out) {
  const Recorded recorded(name);
  const Tensor input = shared(x), weight = shared(packed), units = shared(scales);
  const std::optional<Tensor> added = shared_if(bias);
  *out = handed_over(
      are_watched() ? dispatched<Tensor>(name, input, weight, units, added, features)
                    : rounded_linear<form>(input, weight, units, added, features));
  return AOTI_TORCH_SUCCESS;
}

template <const RoundedWeight& form>
std::vector<Tensor> rounded_linears_shim(
    const char* name, Handle x, const Ends& ends, const Handle* packed, int64_t weights, const Handle* scales,
    int64_t units, const Handle* biases, int64_t added, const int64_t* features, int64_t count) {
  const Recorded recorded(name);
  const Tensor input = shared(x);
  const std::vector<Tensor> all = shared(packed, weights), all_units = shared(scales, units),
                            all_added = shared(biases, added);
  const std::vector<int64_t> sizes(features, features + count);
  if (!are_watched()) {
    return rounded_linears<form>(input, ends, all, all_units, all_added, sizes);
  }
  if (ends.is_empty()) {
    return dispatched<std::vector<Tensor>>(name, input, all, all_units, all_added, sizes);
  }
  return dispatched<std::vector<Tensor>>(
      name, input, ends.gate, std::string(ends.activation), ends.norm, ends.eps, ends.offset, ends.residual, all, all_units,
      all_added, sizes);
}

template <const RoundedWeight& form>
AOTITorchError rounded_expert_linear_shim(
    const char* name, Handle x, Handle experts, Handle packed, Handle scales, const Handle* bias, int64_t features,
    Handle* out) {
  const Recorded recorded(name);
  const Tensor input = shared(x), chosen = shared(experts), weight = shared(packed), units = shared(scales);
  const std::optional<Tensor> added = shared_if(bias);
  *out = handed_over(
      are_watched() ? dispatched<Tensor>(name, input, chosen, weight, units, added, features)
                    : rounded_expert_linear<form>(input, chosen, weight, units, added, features));
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

// The ops of a form of rounded weights that bodies call.
#define ROUNDED_SHIMS(FORM)                                                                                            \
  SHIM aoti_torch_cpu_##FORM##_linear(                                                                                 \
      Handle x, Handle packed, Handle scales, const Handle* bias, int64_t features, Handle* out) {                     \
    return rounded_linear_shim<FORM##_weight>(                                                                         \
        "speccompile::" #FORM "_linear", x, packed, scales, bias, features, out);                                      \
  }                                                                                                                    \
  SHIM aoti_torch_cpu_##FORM##_expert_linear(                                                                          \
      Handle x, Handle experts, Handle packed, Handle scales, const Handle* bias, int64_t features, Handle* out) {     \
    return rounded_expert_linear_shim<FORM##_weight>(                                                                  \
        "speccompile::" #FORM "_expert_linear", x, experts, packed, scales, bias, features, out);                      \
  }                                                                                                                    \
  SHIM aoti_torch_cpu_##FORM##_linears(                                                                                \
      Handle x, const Handle* packed, int64_t weights, const Handle* scales, int64_t units, const Handle* biases,      \
      int64_t added, const int64_t* features, int64_t count, ...) {                                                    \
    const auto made = rounded_linears_shim<FORM##_weight>(                                                             \
        "speccompile::" #FORM "_linears", x, {}, packed, weights, scales, units, biases, added, features, count);          \
    va_list out;                                                                                                       \
    va_start(out, count);                                                                                              \
    hand_over(made, out);                                                                                              \
    va_end(out);                                                                                                       \
    return AOTI_TORCH_SUCCESS;                                                                                         \
  }                                                                                                                    \
  SHIM aoti_torch_cpu_fused_##FORM##_linears(                                                                          \
      Handle x, const Handle* gate, const char* activation, const Handle* norm, double eps, double offset,             \
      const Handle* residual, const Handle* packed, int64_t weights, const Handle* scales, int64_t units,              \
      const Handle* biases, int64_t added, const int64_t* features, int64_t count, ...) {                              \
    const Ends ends{shared_if(gate), activation, shared_if(norm), eps, offset, shared_if(residual)};                   \
    const auto made = rounded_linears_shim<FORM##_weight>(                                                             \
        "speccompile::fused_" #FORM "_linears", x, ends, packed, weights, scales, units, biases, added, features,      \
        count);                                                                                                        \
    va_list out;                                                                                                       \
    va_start(out, count);                                                                                              \
    hand_over(made, out);                                                                                              \
    va_end(out);                                                                                                       \
    return AOTI_TORCH_SUCCESS;                                                                                         \
  }

ROUNDED_SHIMS(int8)
ROUNDED_SHIMS(int4)
ROUNDED_SHIMS(fp4)

}  // namespace speccompile
