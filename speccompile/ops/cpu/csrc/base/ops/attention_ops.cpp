// Attention over cached keys and values, as torch sees it; speccompile/ops/attention.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../kernels/attention.h"
#include "ops.h"
#include "share.h"

namespace speccompile {
namespace {

// A node comes after its parent, and one place further on: what is walked from a node on ends at a root.
void check_parents(const Tensor& parents, const Tensor& positions, int64_t rows, int64_t width) {
  STD_TORCH_CHECK(
      parents.dim() == 2 && parents.size(0) == rows && parents.size(1) == width,
      "speccompile::attention: parents have another shape than positions");
  const int64_t* of = static_cast<const int64_t*>(parents.data_ptr());
  const int64_t* at = static_cast<const int64_t*>(positions.data_ptr());
  for (int64_t i = 0; i < rows * width; ++i) {
    const int64_t node = i % width;
    STD_TORCH_CHECK(
        of[i] >= -1 && of[i] < node, "speccompile::attention: node ", node, " has the parent ", of[i]);
    const int64_t expected = of[i] == -1 ? at[i - node] : at[i - node + of[i]] + 1;
    STD_TORCH_CHECK(at[i] == expected, "speccompile::attention: node ", node, " is at position ", at[i]);
  }
}

}  // namespace

Tensor native_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& positions,
    double scale, const std::optional<int64_t>& window, const std::optional<int64_t>& chunk,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents) {
  STD_TORCH_CHECK(
      window.value_or(1) >= 1, "speccompile::attention needs a window of at least 1, not ", window.value_or(1));
  STD_TORCH_CHECK(chunk.value_or(1) >= 1, "speccompile::attention needs a chunk of at least 1, not ", chunk.value_or(1));
  const Tensor queries = q.stride(3) == 1 ? q : side_by_side(q);
  STD_TORCH_CHECK(
      q.scalar_type() == k_cache.scalar_type() && q.scalar_type() == v_cache.scalar_type(),
      "speccompile::attention: queries, keys and values have different dtypes");
  STD_TORCH_CHECK(k_cache.stride(3) == 1 && v_cache.stride(3) == 1, "speccompile::attention: a head's features lie apart");
  const Tensor own_slots = side_by_side(slots), own_positions = side_by_side(positions);
  // Any tensor stands in for those that are not there.
  const Tensor own_sinks = sinks ? side_by_side(as_float(*sinks)) : slots;
  const Tensor own_parents = parents ? side_by_side(*parents) : slots;
  if (parents) {
    check_parents(own_parents, own_positions, q.size(0), q.size(1));
  }
  Tensor out = new_floats({q.size(0), q.size(1), q.size(2), v_cache.size(3)});
  Attention problem{};
  problem.rows = q.size(0);
  problem.width = q.size(1);
  problem.heads = q.size(2);
  problem.groups = k_cache.size(2);
  problem.depth = q.size(3);
  problem.value_depth = v_cache.size(3);
  problem.type = type_of(q);
  problem.q = queries.data_ptr();
  problem.k = k_cache.data_ptr();
  problem.v = v_cache.data_ptr();
  problem.q_row = queries.stride(0);
  problem.q_place = queries.stride(1);
  problem.q_head = queries.stride(2);
  problem.k_slot = k_cache.stride(0);
  problem.k_place = k_cache.stride(1);
  problem.k_head = k_cache.stride(2);
  problem.v_slot = v_cache.stride(0);
  problem.v_place = v_cache.stride(1);
  problem.v_head = v_cache.stride(2);
  problem.slots = static_cast<const int64_t*>(own_slots.data_ptr());
  problem.positions = static_cast<const int64_t*>(own_positions.data_ptr());
  problem.scale = static_cast<float>(scale);
  problem.window = window.value_or(kNone);
  problem.chunk = chunk.value_or(kNone);
  problem.softcap = static_cast<float>(softcap.value_or(0.0));
  problem.sinks = sinks ? static_cast<const float*>(own_sinks.data_ptr()) : nullptr;
  problem.parents = parents ? static_cast<const int64_t*>(own_parents.data_ptr()) : nullptr;
  problem.out = static_cast<float*>(out.data_ptr());

  std::vector<Queries> pieces(most_pieces(problem));
  const Plan made = plan(problem, pieces.data());
  pieces.resize(made.count);
  std::vector<int64_t> costs(made.count);
  int64_t dearest = 0, all_costs = 0;
  for (int64_t i = 0; i < made.count; ++i) {
    costs[i] = block_cost(problem, pieces[i]) * (pieces[i].last_block - pieces[i].first_block);
    dearest = std::max(dearest, costs[i]);
    all_costs += costs[i];
  }
  if (dearest * 4 * static_cast<int64_t>(thread_count()) <= all_costs) {
    share_out(costs, [&](int64_t i) { attend(problem, pieces[i]); });
  } else {
    // Few queries, or many of one row: the keys are shared out.
    thread_local std::vector<float> parts;
    parts.resize(std::max<size_t>(parts.size(), made.parts * part_size(problem)));
    float* const all = parts.data();
    std::vector<const Queries*> piece_of;
    costs.clear();
    for (const Queries& piece : pieces) {
      piece_of.insert(piece_of.end(), piece.last_block - piece.first_block, &piece);
      costs.insert(costs.end(), piece.last_block - piece.first_block, block_cost(problem, piece));
    }
    share_out(costs, [&](int64_t i) {
      const Queries& piece = *piece_of[i];
      attend_block(problem, piece, piece.first_block + i - piece.first_part, all + i * part_size(problem));
    });
    parallel_for(0, made.count, 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        join_blocks(problem, pieces[i], all);
      }
    });
  }
  return out.scalar_type() == q.scalar_type() ? out : torch::stable::to(out, q.scalar_type());
}

namespace {

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_attention", TORCH_BOX(&native_attention));
}

}  // namespace
}  // namespace speccompile
