// The ops that bodies call.
#pragma once

#include <optional>
#include <vector>

#include "linear_ends_of.h"
#include "tensors.h"

namespace speccompile {

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features);
std::vector<Tensor> packed_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features);
std::vector<Tensor> fused_packed_linears(
    const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features);

Tensor prepare_rows(const Tensor& x, const Ends& ends);
Tensor join_rows(
    const Tensor& a, const Tensor& norm_a, const Tensor& b, const Tensor& norm_b, double eps, double offset);

Tensor native_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& positions,
    double scale, const std::optional<int64_t>& window, const std::optional<int64_t>& chunk,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& pages);

// Keys and values are written into the caches.
Tensor native_rotary_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
    const Tensor& v_cache, const Tensor& slots, const Tensor& positions, double scale,
    const std::optional<int64_t>& window, const std::optional<int64_t>& chunk, const std::optional<double>& softcap,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& pages);

}  // namespace speccompile
