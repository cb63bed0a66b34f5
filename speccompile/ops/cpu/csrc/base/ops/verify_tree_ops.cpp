// Inputs and outcome of the target in a step of trees, as torch sees them; speccompile/ops/verify_tree.py defines the ops.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

void check_slot(int64_t row, int64_t slot, int64_t slot_count) {
  STD_TORCH_CHECK(slot >= 0 && slot < slot_count, "speccompile: row ", row, " has no slot ", slot);
}

void check_node(int64_t row, int64_t node, int64_t node_count) {
  STD_TORCH_CHECK(node >= 0 && node < node_count, "speccompile: the tree of row ", row, " has no node ", node);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> newest_and_nodes_op(
    const Tensor& tokens, const Tensor& length, const Tensor& slots, const Tensor& drafts, const Tensor& depths,
    int64_t vocab_size) {
  const int64_t slot_count = tokens.size(0), capacity = tokens.size(1), rows = slots.numel(), width = depths.size(1);
  STD_TORCH_CHECK(
      length.numel() == slot_count && drafts.size(0) == rows && drafts.size(1) == width - 1 && depths.size(0) == rows,
      "speccompile::newest_and_nodes: the sizes do not fit");
  const Tensor own_slots = side_by_side(slots), own_drafts = side_by_side(drafts), own_depths = side_by_side(depths);
  const Tensor read = new_integers({rows, width}), positions = new_integers({rows, width}),
               places = new_integers({rows, width}), root = new_integers({rows});
  const int64_t *texts = integers(tokens), *lengths = integers(length), *slot_of = integers(own_slots);
  const int64_t *draft_of = integers(own_drafts), *depth_of = integers(own_depths);
  int64_t *to_read = integers(read), *to_positions = integers(positions), *to_places = integers(places),
          *to_root = integers(root);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row];
          check_slot(row, slot, slot_count);
          const int64_t at = std::max<int64_t>(lengths[slot] - 1, 0);
          STD_TORCH_CHECK(at < capacity, "speccompile: the text of slot ", slot, " has no place ", at);
          const int64_t newest = texts[slot * capacity + at];
          to_root[row] = at;
          for (int64_t node = 0; node < width; ++node) {
            const int64_t i = row * width + node;
            // What is not a token is read as the newest one.
            const int64_t draft = node ? draft_of[row * (width - 1) + node - 1] : -1;
            to_read[i] = draft >= 0 && draft < vocab_size ? draft : newest;
            to_positions[i] = at + depth_of[i];
            to_places[i] = at + node;
          }
        }
      },
      slots.is_contiguous() && drafts.is_contiguous() && depths.is_contiguous());
  return {read, positions, places, root};
}

// Also of tokens: [B, T] are rows of one value.
Tensor rows_on_path_op(const Tensor& values, const Tensor& path) {
  STD_TORCH_CHECK(
      values.dim() >= 2 && path.dim() == 2 && values.size(0) == path.size(0),
      "speccompile::rows_on_path: the sizes do not fit");
  const int64_t rows = path.size(0), width = path.size(1), nodes = values.size(1);
  const Tensor own = side_by_side(values), own_path = side_by_side(path);
  std::vector<int64_t> sizes{values.sizes().begin(), values.sizes().end()};
  sizes[1] = width;
  const Tensor found = new_tensor(sizes, dtype_of(values));
  const int64_t bytes = values.numel() / std::max<int64_t>(rows * nodes, 1) * values.element_size();
  const int64_t* node_of = integers(own_path);
  const char* from = static_cast<const char*>(own.data_ptr());
  char* to = static_cast<char*>(found.data_ptr());
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t row = i / width, node = node_of[i];
          check_node(row, node, nodes);
          std::memcpy(to + i * bytes, from + (row * nodes + node) * bytes, bytes);
        }
      },
      values.is_contiguous() && path.is_contiguous());
  return found;
}

// A row's tree. Node i > 0 has the draft i - 1.
struct DraftTree {
  const int64_t *drafts, *parents;
  int64_t nodes;
  const std::vector<int64_t>& others;

  bool there(int64_t node) const { return drafts[node - 1] >= 0; }

  // Whether a chain of the first choices goes from the node's parent to the node.
  bool first(int64_t node) const {
    if (!there(node) || std::find(others.begin(), others.end(), node) != others.end()) {
      return false;
    }
    for (int64_t earlier = 1; earlier < node; ++earlier) {
      if (parents[earlier] == parents[node] && there(earlier)) {
        return false;
      }
    }
    return true;
  }

  bool has_first_child(int64_t parent) const {
    for (int64_t node = 1; node <= nodes; ++node) {
      if (parents[node] == parent && first(node)) {
        return true;
      }
    }
    return false;
  }
};

void judge_chain_op(
    const Tensor& drafts, const Tensor& parents, const Tensor& depths, const Tensor& path, const Tensor& accepted,
    const Tensor& slots, Tensor chain_accepted, Tensor chain_judged, Tensor deepest,
    const std::vector<int64_t>& others) {
  const int64_t rows = drafts.size(0), nodes = drafts.size(1), width = path.size(1);
  const int64_t slot_count = chain_accepted.numel();
  STD_TORCH_CHECK(
      nodes > 0 && width > 0 && parents.size(0) == rows && parents.size(1) == nodes + 1 && depths.size(0) == rows &&
          depths.size(1) == nodes + 1 && path.size(0) == rows && accepted.numel() == rows && slots.numel() == rows &&
          chain_judged.numel() == slot_count && deepest.numel() == slot_count,
      "speccompile::judge_chain_: the sizes do not fit");
  for (const int64_t node : others) {
    STD_TORCH_CHECK(node > 0 && node <= nodes, "speccompile::judge_chain_: the tree has no node ", node);
  }
  const Tensor own_drafts = side_by_side(drafts), own_parents = side_by_side(parents),
               own_depths = side_by_side(depths), own_path = side_by_side(path), own_accepted = side_by_side(accepted),
               own_slots = side_by_side(slots);
  const int64_t *draft_of = integers(own_drafts), *parent_of = integers(own_parents), *depth_of = integers(own_depths);
  const int64_t *path_of = integers(own_path), *accepted_of = integers(own_accepted), *slot_of = integers(own_slots);
  int64_t *to_accepted = integers(chain_accepted), *to_judged = integers(chain_judged), *to_deepest = integers(deepest);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = slot_of[row], *on_path = path_of + row * width;
          check_slot(row, slot, slot_count);
          const DraftTree tree{draft_of + row * nodes, parent_of + row * (nodes + 1), nodes, others};
          int64_t count = 0, deepest_of_row = tree.there(1) ? depth_of[row * (nodes + 1) + 1] : 0;
          for (int64_t node = 2; node <= nodes; ++node) {
            deepest_of_row =
                std::max<int64_t>(deepest_of_row, tree.there(node) ? depth_of[row * (nodes + 1) + node] : 0);
          }
          while (count + 1 < width && count < accepted_of[row]) {
            const int64_t next = std::max<int64_t>(on_path[count + 1], 1);
            check_node(row, next, nodes + 1);
            if (!tree.first(next)) {
              break;
            }
            ++count;
          }
          to_accepted[slot] = count;
          to_judged[slot] = count + tree.has_first_child(on_path[count]);
          to_deepest[slot] = deepest_of_row;
        }
      },
      drafts.is_contiguous() && parents.is_contiguous() && depths.is_contiguous() && path.is_contiguous() &&
          accepted.is_contiguous() && slots.is_contiguous());
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("newest_and_nodes", TORCH_BOX(&newest_and_nodes_op));
  m.impl("tokens_on_path", TORCH_BOX(&rows_on_path_op));
  m.impl("rows_on_path", TORCH_BOX(&rows_on_path_op));
  m.impl("judge_chain_", TORCH_BOX(&judge_chain_op));
}

}  // namespace
}  // namespace speccompile
