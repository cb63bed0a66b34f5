// Attention over cached keys and values, as torch sees it; speccompile/ops/attention.py defines it.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "../kernels/cached_rows.h"
#include "attend.h"
#include "kernel_calls.h"
#include "ops.h"

namespace speccompile {
namespace {

// A node comes after its parent, and one place further on: what is walked from a node on ends at a root.
void check_parents(const Attention& problem) {
  const int64_t *of = problem.parents, *at = problem.positions;
  for (int64_t i = 0; i < problem.rows * problem.width; ++i) {
    const int64_t node = i % problem.width;
    STD_TORCH_CHECK(
        of[i] >= -1 && of[i] < node, "speccompile::attention: node ", node, " has the parent ", of[i]);
    const int64_t expected = of[i] == -1 ? at[i - node] : at[i - node + of[i]] + 1;
    STD_TORCH_CHECK(at[i] == expected, "speccompile::attention: node ", node, " is at position ", at[i]);
  }
}

void run(const Attention& problem, bool repeatable) {
  run_kernel(
      [problem] {
        if (problem.parents) {
          check_parents(problem);
        }
        attend(problem);
      },
      repeatable);
}

Heads heads_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Cache cache_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

bool is_in_8_bits(const Tensor& cache) {
  return cache.scalar_type() == ScalarType::Char;
}

// As features_of in ops/kv_rows.py.
int64_t features_of(const Tensor& cache) {
  const int64_t size = cache.size(3);
  return is_in_8_bits(cache) ? size - 2 * ((size + kScaled + 1) / (kScaled + 2)) : size;
}

bool is_dense(const Tensor& tensor) {
  return tensor.stride(tensor.dim() - 1) == 1;
}

Tensor dense(const Tensor& tensor) {
  return is_dense(tensor) ? tensor : side_by_side(tensor);
}

// Tensors of the op; `problem` has their addresses and sizes.
struct Arguments {
  const Tensor queries, slots, positions;
  const std::optional<Tensor> sinks, parents, pages;
  // Whether these are the tensors that were given, and no copies.
  const bool are_given;
};

Attention problem_of(
    const Arguments& own, const Tensor& k_cache, const Tensor& v_cache, double scale,
    const std::optional<int64_t>& window, const std::optional<int64_t>& chunk, const std::optional<double>& softcap,
    const Tensor& out) {
  STD_TORCH_CHECK(
      window.value_or(1) >= 1, "speccompile::attention needs a window of at least 1, not ", window.value_or(1));
  STD_TORCH_CHECK(chunk.value_or(1) >= 1, "speccompile::attention needs a chunk of at least 1, not ", chunk.value_or(1));
  const Tensor& q = own.queries;
  STD_TORCH_CHECK(
      k_cache.scalar_type() == v_cache.scalar_type(), "speccompile::attention: keys and values have different dtypes");
  STD_TORCH_CHECK(k_cache.stride(3) == 1 && v_cache.stride(3) == 1, "speccompile::attention: a head's features lie apart");
  STD_TORCH_CHECK(
      !own.parents ||
          (own.parents->dim() == 2 && own.parents->size(0) == q.size(0) && own.parents->size(1) == q.size(1)),
      "speccompile::attention: parents have another shape than positions");
  Attention problem{};
  problem.rows = q.size(0);
  problem.width = q.size(1);
  problem.heads = q.size(2);
  problem.groups = k_cache.size(2);
  problem.depth = q.size(3);
  problem.value_depth = features_of(v_cache);
  problem.cache_slots = problem.cache_pages = k_cache.size(0);
  problem.cache_places = k_cache.size(1);
  if (own.pages) {
    STD_TORCH_CHECK(
        own.pages->dim() == 2 && k_cache.size(1) % kBlock == 0 && v_cache.size(1) == k_cache.size(1),
        "speccompile::attention: pages are [N, M], and each has a multiple of ", kBlock, " positions");
    problem.pages = {static_cast<const int64_t*>(own.pages->data_ptr()), own.pages->size(1), k_cache.size(1)};
    problem.cache_slots = own.pages->size(0);
    problem.cache_places = problem.pages.count * problem.pages.size;
  }
  problem.type = type_of(q);
  problem.in_8_bits = is_in_8_bits(k_cache);
  problem.cache_type = problem.in_8_bits ? problem.type : type_of(k_cache);
  STD_TORCH_CHECK(
      !problem.in_8_bits || features_of(k_cache) == problem.depth,
      "speccompile::attention: rows of 8 bits hold ", features_of(k_cache), " features, and queries have ", problem.depth);
  problem.q = heads_of(q);
  problem.k = cache_of(k_cache);
  problem.v = cache_of(v_cache);
  problem.slots = static_cast<const int64_t*>(own.slots.data_ptr());
  problem.positions = static_cast<const int64_t*>(own.positions.data_ptr());
  problem.scale = static_cast<float>(scale);
  problem.window = window.value_or(kNone);
  problem.chunk = chunk.value_or(kNone);
  problem.softcap = static_cast<float>(softcap.value_or(0.0));
  if (own.sinks) {
    problem.sinks_type = type_of(*own.sinks);
    problem.sinks = own.sinks->data_ptr();
  }
  problem.parents = own.parents ? static_cast<const int64_t*>(own.parents->data_ptr()) : nullptr;
  problem.out = out.data_ptr();
  return problem;
}

Arguments arguments_of(
    const Tensor& q, const Tensor& slots, const Tensor& positions, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& parents, const std::optional<Tensor>& pages) {
  const auto if_any = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional<Tensor>(side_by_side(*tensor)) : std::nullopt;
  };
  const bool are_given = is_dense(q) && slots.is_contiguous() && positions.is_contiguous() &&
      (!sinks || sinks->is_contiguous()) && (!parents || parents->is_contiguous()) &&
      (!pages || pages->is_contiguous());
  return {dense(q),        side_by_side(slots), side_by_side(positions), if_any(sinks),
          if_any(parents), if_any(pages),       are_given};
}

Tensor new_output(const Tensor& q, const Tensor& v_cache) {
  return new_tensor({q.size(0), q.size(1), q.size(2), features_of(v_cache)}, dtype_of(q));
}

void check_rotary(
    const Attention& problem, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin) {
  const auto begins = [&](const Tensor& tensor, int64_t dims) {
    return tensor.dim() == dims && tensor.size(0) == problem.rows && tensor.size(1) == problem.width;
  };
  STD_TORCH_CHECK(
      begins(k, 4) && k.size(2) == problem.groups && k.size(3) == problem.depth && begins(v, 4) &&
          v.size(2) == problem.groups && v.size(3) == problem.value_depth,
      "speccompile::rotary_attention: keys and values do not fit the cache");
  const int64_t features = cos.size(cos.dim() - 1);
  STD_TORCH_CHECK(
      begins(cos, 3) && begins(sin, 3) && sin.size(2) == features && features % 2 == 0 && features <= problem.depth,
      "speccompile::rotary_attention: cosines and sines are not [B, T, features]");
  for (const Tensor& tensor : {k, v, cos, sin}) {
    STD_TORCH_CHECK(
        type_of(tensor) == problem.type, "speccompile::rotary_attention: the tensors have different dtypes");
  }
}

}  // namespace

Tensor native_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& positions,
    double scale, const std::optional<int64_t>& window, const std::optional<int64_t>& chunk,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& pages) {
  const Arguments own = arguments_of(q, slots, positions, sinks, parents, pages);
  Tensor out = new_output(q, v_cache);
  run(problem_of(own, k_cache, v_cache, scale, window, chunk, softcap, out), own.are_given);
  return out;
}

Tensor native_rotary_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
    const Tensor& v_cache, const Tensor& slots, const Tensor& positions, double scale,
    const std::optional<int64_t>& window, const std::optional<int64_t>& chunk, const std::optional<double>& softcap,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& pages) {
  const Arguments own = arguments_of(q, slots, positions, sinks, parents, pages);
  const Tensor keys = dense(k), values = dense(v), cosines = dense(cos), sines = dense(sin);
  Tensor out = new_output(q, v_cache);
  Attention problem = problem_of(own, k_cache, v_cache, scale, window, chunk, softcap, out);
  check_rotary(problem, keys, values, cosines, sines);
  problem.rotates = true;
  problem.rotary = {heads_of(keys), heads_of(values), heads_of(cosines), heads_of(sines), cosines.size(2)};
  run(problem, own.are_given && is_dense(k) && is_dense(v) && is_dense(cos) && is_dense(sin));
  return out;
}

namespace {

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_attention", TORCH_BOX(&native_attention));
  m.impl("native_rotary_attention", TORCH_BOX(&native_rotary_attention));
}

}  // namespace
}  // namespace speccompile
