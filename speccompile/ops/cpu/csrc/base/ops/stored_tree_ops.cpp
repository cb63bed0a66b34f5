// Trees of drafts that pass through state; speccompile/ops/stored_trees.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "checks.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

void store_proposed_tree_op(
    Tensor tree_tokens, Tensor tree_parents, Tensor tree_count, const Tensor& slots, const Tensor& tokens,
    const Tensor& parents, const Tensor& count) {
  const int64_t rows = tokens.size(0), width = tokens.size(1), slot_count = tree_tokens.size(0);
  check_fit(
      tree_tokens.size(1) == width && tree_parents.numel() == tree_tokens.numel() && tree_count.numel() == slot_count &&
          parents.numel() == tokens.numel() && slots.numel() == rows && count.numel() == rows,
      "store_proposed_tree_");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(tokens), own_parents = side_by_side(parents),
               own_count = side_by_side(count);
  const int64_t *slot_of = integers(own_slots), *from = integers(own), *of = integers(own_parents),
                *counts = integers(own_count);
  int64_t *to = integers(tree_tokens), *to_parents = integers(tree_parents), *to_count = integers(tree_count);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = checked_index(slot_of[row], slot_count, "store_proposed_tree_");
          std::copy_n(from + row * width, width, to + slot * width);
          std::copy_n(of + row * width, width, to_parents + slot * width);
          to_count[slot] = std::clamp<int64_t>(counts[row], 0, width);
        }
      },
      slots.is_contiguous() && tokens.is_contiguous() && parents.is_contiguous() && count.is_contiguous());
}

void store_tree_op(
    Tensor stored_drafts, Tensor stored_parents, Tensor stored_depths, Tensor stored_lens, const Tensor& slots,
    const Tensor& drafts, const Tensor& parents, const Tensor& depths, const Tensor& lens) {
  const int64_t rows = drafts.size(0), nodes = drafts.size(1), most = stored_drafts.size(1),
                slot_count = stored_drafts.size(0);
  check_fit(
      nodes <= most && parents.numel() == rows * (nodes + 1) && depths.numel() == rows * (nodes + 1) &&
          slots.numel() == rows && lens.numel() == rows && stored_parents.numel() == stored_drafts.numel() &&
          stored_depths.numel() == stored_drafts.numel() && stored_lens.numel() == slot_count,
      "store_tree_");
  const Tensor own_slots = side_by_side(slots), own = side_by_side(drafts), own_parents = side_by_side(parents),
               own_depths = side_by_side(depths), own_lens = side_by_side(lens);
  const int64_t *slot_of = integers(own_slots), *from = integers(own), *of = integers(own_parents),
                *deep = integers(own_depths), *counts = integers(own_lens);
  int64_t *to = integers(stored_drafts), *to_parents = integers(stored_parents), *to_depths = integers(stored_depths),
          *to_lens = integers(stored_lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = checked_index(slot_of[row], slot_count, "store_tree_"), at = slot * most;
          std::fill_n(std::copy_n(from + row * nodes, nodes, to + at), most - nodes, int64_t{-1});
          std::fill_n(std::copy_n(of + row * (nodes + 1) + 1, nodes, to_parents + at), most - nodes, int64_t{0});
          std::fill_n(std::copy_n(deep + row * (nodes + 1) + 1, nodes, to_depths + at), most - nodes, int64_t{1});
          to_lens[slot] = counts[row];
        }
      },
      slots.is_contiguous() && drafts.is_contiguous() && parents.is_contiguous() && depths.is_contiguous() &&
          lens.is_contiguous());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> stored_tree_op(
    const Tensor& stored_drafts, const Tensor& stored_parents, const Tensor& stored_depths, const Tensor& stored_lens,
    const Tensor& slots, int64_t nodes) {
  const int64_t rows = slots.numel(), most = stored_drafts.size(1), slot_count = stored_drafts.size(0);
  check_fit(
      nodes <= most && stored_parents.numel() == stored_drafts.numel() &&
          stored_depths.numel() == stored_drafts.numel() && stored_lens.numel() == slot_count,
      "stored_tree");
  const Tensor own_slots = side_by_side(slots);
  const Tensor drafts = new_integers({rows, nodes}), parents = new_integers({rows, nodes + 1}),
               depths = new_integers({rows, nodes + 1}), lens = new_integers({rows});
  const int64_t *slot_of = integers(own_slots), *from = integers(stored_drafts), *of = integers(stored_parents),
                *deep = integers(stored_depths), *counts = integers(stored_lens);
  int64_t *to = integers(drafts), *to_parents = integers(parents), *to_depths = integers(depths), *to_lens = integers(lens);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = checked_index(slot_of[row], slot_count, "stored_tree"), at = row * (nodes + 1);
          std::copy_n(from + slot * most, nodes, to + row * nodes);
          to_parents[at] = -1;
          to_depths[at] = 0;
          std::copy_n(of + slot * most, nodes, to_parents + at + 1);
          std::copy_n(deep + slot * most, nodes, to_depths + at + 1);
          to_lens[row] = counts[slot];
        }
      },
      slots.is_contiguous());
  return {drafts, parents, depths, lens};
}

Tensor chain_parents_op(const Tensor& lens, int64_t width) {
  const int64_t rows = lens.numel();
  const Tensor parents = new_integers({rows, width});
  int64_t* to = integers(parents);
  run_kernel([=] {
    for (int64_t i = 0; i < rows * width; ++i) {
      to[i] = i % width;
    }
  });
  return parents;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> proposed_or_stored_tree_op(
    const Tensor& draft_lens, const Tensor& slots, const Tensor& drafts, const Tensor& parents, const Tensor& depths,
    const Tensor& lens, const Tensor& other_drafts, const Tensor& other_parents, const Tensor& other_depths,
    const Tensor& other_lens) {
  const int64_t rows = slots.numel(), slot_count = draft_lens.numel();
  const Tensor own_slots = side_by_side(slots);
  const int64_t *slot_of = integers(own_slots), *proposals = integers(draft_lens);
  struct Part {
    const int64_t *one, *other;
    int64_t* to;
    int64_t width;
  };
  std::vector<Tensor> given, made;
  std::vector<Part> parts;
  bool repeatable = slots.is_contiguous();
  check_fit(lens.numel() == rows, "proposed_or_stored_tree");
  const auto add = [&](const Tensor& one, const Tensor& other) {
    check_fit(one.size(0) == rows && one.numel() == other.numel(), "proposed_or_stored_tree");
    repeatable &= one.is_contiguous() && other.is_contiguous();
    given.push_back(side_by_side(one));
    given.push_back(side_by_side(other));
    made.push_back(new_integers({one.sizes().begin(), one.sizes().end()}));
    parts.push_back(
        {integers(given[given.size() - 2]), integers(given.back()), integers(made.back()),
         rows == 0 ? 0 : one.numel() / rows});
  };
  add(drafts, other_drafts);
  add(parents, other_parents);
  add(depths, other_depths);
  add(lens, other_lens);
  run_kernel(
      [=, lens_of = parts.back().other] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = checked_index(slot_of[row], slot_count, "proposed_or_stored_tree");
          const bool other = proposals[slot] == 0 && lens_of[row] > 0;
          for (const Part& part : parts) {
            std::copy_n((other ? part.other : part.one) + row * part.width, part.width, part.to + row * part.width);
          }
        }
      },
      repeatable);
  return {made[0], made[1], made[2], made[3]};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("store_proposed_tree_", TORCH_BOX(&store_proposed_tree_op));
  m.impl("store_tree_", TORCH_BOX(&store_tree_op));
  m.impl("stored_tree", TORCH_BOX(&stored_tree_op));
  m.impl("chain_parents", TORCH_BOX(&chain_parents_op));
  m.impl("proposed_or_stored_tree", TORCH_BOX(&proposed_or_stored_tree_op));
}

}  // namespace
}  // namespace speccompile
