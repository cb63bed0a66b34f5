#include "shims.h"

#include "ops.h"

namespace speccompile {

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

SHIM aoti_torch_cpu_fused_packed_linears(
    Handle x, const Handle* gate, const char* activation, const Handle* norm, double eps, double offset,
    const Handle* residual, const Handle* packed, int64_t weights, const Handle* biases, int64_t added,
    const int64_t* features, int64_t count, ...) {
  const Recorded recorded("speccompile::fused_packed_linears");
  const Ends ends{shared_if(gate), activation, shared_if(norm), eps, offset, shared_if(residual)};
  const auto made = fused_packed_linears(
      shared(x), ends, shared(packed, weights), shared(biases, added), std::vector<int64_t>(features, features + count));
  va_list out;
  va_start(out, count);
  hand_over(made, out);
  va_end(out);
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_prepare_rows(
    Handle x, const Handle* gate, const char* activation, const Handle* norm, double eps, double offset, Handle* out) {
  const Recorded recorded("speccompile::prepare_rows");
  *out = handed_over(
      prepare_rows(shared(x), {shared_if(gate), activation, shared_if(norm), eps, offset, std::nullopt}));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_join_rows(
    Handle a, Handle norm_a, Handle b, Handle norm_b, double eps, double offset, Handle* out) {
  const Recorded recorded("speccompile::join_rows");
  *out = handed_over(join_rows(shared(a), shared(norm_a), shared(b), shared(norm_b), eps, offset));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_native_attention(
    Handle q, Handle k_cache, Handle v_cache, Handle slots, Handle positions, double scale, const int64_t* window,
    const int64_t* chunk, const double* softcap, const Handle* sinks, const Handle* parents,
    const Handle* pages, Handle* out) {
  const Recorded recorded("speccompile::native_attention");
  *out = handed_over(native_attention(
      shared(q), shared(k_cache), shared(v_cache), shared(slots), shared(positions), scale, value_if(window),
      value_if(chunk), value_if(softcap), shared_if(sinks), shared_if(parents), shared_if(pages)));
  return AOTI_TORCH_SUCCESS;
}

SHIM aoti_torch_cpu_native_rotary_attention(
    Handle q, Handle k, Handle v, Handle cos, Handle sin, Handle k_cache, Handle v_cache, Handle slots,
    Handle positions, double scale, const int64_t* window, const int64_t* chunk, const double* softcap,
    const Handle* sinks, const Handle* parents,
    const Handle* pages, Handle* out) {
  const Recorded recorded("speccompile::native_rotary_attention");
  *out = handed_over(native_rotary_attention(
      shared(q), shared(k), shared(v), shared(cos), shared(sin), shared(k_cache), shared(v_cache), shared(slots),
      shared(positions), scale, value_if(window), value_if(chunk), value_if(softcap), shared_if(sinks),
      shared_if(parents), shared_if(pages)));
  return AOTI_TORCH_SUCCESS;
}

}  // namespace speccompile
