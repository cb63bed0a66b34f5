// The ops that bodies call, as the C++ that Inductor writes calls them: by their names, without torch's dispatcher, which
// takes longer than some of them. speccompile/ops/cpu/shims.py declares them.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdarg>

#include "ops.h"
#include "recorded.h"

#define SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

namespace speccompile {
namespace {

using Handle = AtenTensorHandle;

// Handles that come in are the caller's.
Tensor shared(Handle handle) {
  Handle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

std::vector<Tensor> shared(const Handle* handles, int64_t count) {
  std::vector<Tensor> made;
  made.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(shared(handles[i]));
  }
  return made;
}

std::optional<Tensor> shared_if(const Handle* handle) {
  return handle ? std::optional<Tensor>(shared(*handle)) : std::nullopt;
}

template <typename T>
std::optional<T> value_if(const T* value) {
  return value ? std::optional<T>(*value) : std::nullopt;
}

Handle handed_over(const Tensor& tensor) {
  Handle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &own));
  return own;
}

// Every op has to be seen: the check of a captured graph, which rounds no inputs.
bool are_watched() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

template <typename Result, typename... Arguments>
Result dispatched(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Result>(stack[0]);
}

// After the arguments of ops with as many results as there are weights stands where each one goes.
void hand_over(const std::vector<Tensor>& made, va_list out) {
  for (const Tensor& tensor : made) {
    *va_arg(out, Handle*) = handed_over(tensor);
  }
}

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
    const char* name, Handle x, const Handle* packed, int64_t weights, const Handle* scales, int64_t units,
    const Handle* biases, int64_t added, const int64_t* features, int64_t count) {
  const Recorded recorded(name);
  const Tensor input = shared(x);
  const std::vector<Tensor> all = shared(packed, weights), all_units = shared(scales, units),
                            all_added = shared(biases, added);
  const std::vector<int64_t> sizes(features, features + count);
  return are_watched() ? dispatched<std::vector<Tensor>>(name, input, all, all_units, all_added, sizes)
                       : rounded_linears<form>(input, all, all_units, all_added, sizes);
}

}  // namespace

SHIM aoti_torch_cpu_packed_linear(Handle x, Handle packed, const Handle* bias, int64_t features, Handle* out) {
  const Recorded recorded("speccompile::packed_linear");
  *out = handed_over(packed_linear(shared(x), shared(packed), shared_if(bias), features));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_packed_linears(
    Handle x, const Handle* packed, int64_t weights, const Handle* biases, int64_t added, const int64_t* features,
    int64_t count, ...) {
  const Recorded recorded("speccompile::packed_linears");
  const auto made = packed_linears(
      shared(x), shared(packed, weights), shared(biases, added), std::vector<int64_t>(features, features + count));
  va_list out;
  va_start(out, count);
  hand_over(made, out);
  va_end(out);
  return AOTI_TORCH_SUCCESS;
}

// The two ops of a form of rounded weights.
#define ROUNDED_SHIMS(FORM)                                                                                            \
  SHIM aoti_torch_cpu_##FORM##_linear(                                                                                 \
      Handle x, Handle packed, Handle scales, const Handle* bias, int64_t features, Handle* out) {                     \
    return rounded_linear_shim<FORM##_weight>(                                                                         \
        "speccompile::" #FORM "_linear", x, packed, scales, bias, features, out);                                      \
  }                                                                                                                    \
  SHIM aoti_torch_cpu_##FORM##_linears(                                                                                \
      Handle x, const Handle* packed, int64_t weights, const Handle* scales, int64_t units, const Handle* biases,      \
      int64_t added, const int64_t* features, int64_t count, ...) {                                                    \
    const auto made = rounded_linears_shim<FORM##_weight>(                                                             \
        "speccompile::" #FORM "_linears", x, packed, weights, scales, units, biases, added, features, count);          \
    va_list out;                                                                                                       \
    va_start(out, count);                                                                                              \
    hand_over(made, out);                                                                                              \
    va_end(out);                                                                                                       \
    return AOTI_TORCH_SUCCESS;                                                                                         \
  }

ROUNDED_SHIMS(int8)
ROUNDED_SHIMS(int4)

SHIM aoti_torch_cpu_native_attention(
    Handle q, Handle k_cache, Handle v_cache, Handle slots, Handle positions, double scale, const int64_t* window,
    const int64_t* chunk, const double* softcap, const Handle* sinks, const Handle* parents, Handle* out) {
  const Recorded recorded("speccompile::native_attention");
  *out = handed_over(native_attention(
      shared(q), shared(k_cache), shared(v_cache), shared(slots), shared(positions), scale, value_if(window),
      value_if(chunk), value_if(softcap), shared_if(sinks), shared_if(parents)));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_native_expert_linear(
    Handle x, Handle experts, Handle weight, const Handle* bias, int32_t transposed, Handle* out) {
  const Recorded recorded("speccompile::native_expert_linear");
  *out = handed_over(native_expert_linear(shared(x), shared(experts), shared(weight), shared_if(bias), transposed));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_native_lora(
    Handle x, const Handle* outputs, int64_t linears, const Handle* a, int64_t all_a, const Handle* b, int64_t all_b,
    Handle ranks, Handle scales, int64_t first, Handle places, ...) {
  const Recorded recorded("speccompile::native_lora");
  const auto made = native_lora(
      shared(x), shared(outputs, linears), shared(a, all_a), shared(b, all_b), shared(ranks), shared(scales), first,
      shared(places));
  va_list out;
  va_start(out, places);
  hand_over(made, out);
  va_end(out);
  return AOTI_TORCH_SUCCESS;
}

}  // namespace speccompile
