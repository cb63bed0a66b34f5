// The ops of draft trees as torch sees them; speccompile/ops/tree.py defines them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../kernels/tree.h"
#include "kernel_calls.h"
#include "tensors.h"

namespace speccompile {
namespace {

int64_t* numbers(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(), "speccompile: trees are int64, side by side");
  return static_cast<int64_t*>(tensor.data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fit_tree_op(
    const Tensor& tokens, const Tensor& parents, const Tensor& count, const Tensor& limit, int64_t nodes, int64_t depth,
    int64_t branches, const std::vector<int64_t>& static_parents, const std::vector<int64_t>& static_ranks) {
  const Tensor own_tokens = side_by_side(tokens), own_parents = side_by_side(parents), own_count = side_by_side(count),
               own_limit = side_by_side(limit);
  const int64_t rows = tokens.size(0), proposed = tokens.size(1);
  const bool fixed = !static_parents.empty();
  const auto size = static_cast<int64_t>(static_parents.size());
  STD_TORCH_CHECK(
      !fixed || (size == nodes && static_ranks.size() == static_parents.size()),
      "speccompile::fit_tree: a static tree has a parent and a rank for each node");
  Tensor drafts = new_integers({rows, nodes}), taken = new_integers({rows, nodes + 1}),
         depths = new_integers({rows, nodes + 1}), lens = new_integers({rows});
  const int64_t *given = numbers(own_tokens), *above = numbers(own_parents), *counts = numbers(own_count),
                *limits = numbers(own_limit);
  int64_t *to = numbers(drafts), *to_parents = numbers(taken), *to_depths = numbers(depths), *to_lens = numbers(lens);
  run_kernel(
      [=] {
        const TreeShape shape{
            nodes, depth, branches, fixed ? static_parents.data() : nullptr, fixed ? static_ranks.data() : nullptr};
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t* of = above + row * proposed;
          const int64_t most = std::max<int64_t>(0, std::min({counts[row], limits[row], proposed}));
          for (int64_t i = 0; i < most; ++i) {
            STD_TORCH_CHECK(
                of[i] >= 0 && of[i] <= i, "speccompile::fit_tree: draft token ", i + 1,
                " of a proposed tree has the parent ", of[i],
                ", and must have that of a token before it: 0 for the newest token of the text, 1 for the first draft ",
                "token");
          }
          const FittedTree out{to + row * nodes, to_parents + row * (nodes + 1), to_depths + row * (nodes + 1)};
          to_lens[row] = fit_tree(given + row * proposed, of, most, shape, out);
        }
      },
      tokens.is_contiguous() && parents.is_contiguous() && count.is_contiguous() && limit.is_contiguous());
  return {drafts, taken, depths, lens};
}

std::tuple<Tensor, Tensor> walk_tree_op(
    const Tensor& target, const Tensor& drafts, const Tensor& parents, int64_t depth) {
  const Tensor own_target = side_by_side(target), own_drafts = side_by_side(drafts), own_parents = side_by_side(parents);
  const int64_t rows = target.size(0), width = target.size(1);
  STD_TORCH_CHECK(
      drafts.size(1) == width - 1 && parents.size(1) == width, "speccompile::walk_tree: the sizes do not fit");
  Tensor path = new_integers({rows, depth + 1}), accepted = new_integers({rows});
  const int64_t *targets = numbers(own_target), *given = numbers(own_drafts), *of = numbers(own_parents);
  int64_t *to = numbers(path), *to_accepted = numbers(accepted);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          to_accepted[row] = walk_tree(
              targets + row * width, given + row * (width - 1), of + row * width, width - 1, depth,
              to + row * (depth + 1));
        }
      },
      target.is_contiguous() && drafts.is_contiguous() && parents.is_contiguous());
  return {path, accepted};
}

void move_path_op(
    std::vector<Tensor> kv, const Tensor& slots, const Tensor& root, const Tensor& path, const Tensor& accepted,
    const std::optional<Tensor>& pages) {
  const Tensor own_slots = side_by_side(slots), own_root = side_by_side(root), own_path = side_by_side(path),
               own_accepted = side_by_side(accepted);
  const std::optional<Tensor> own_pages = pages ? std::optional<Tensor>(side_by_side(*pages)) : std::nullopt;
  const int64_t rows = path.size(0), width = path.size(1);
  struct Cache {
    char* from;
    int64_t places;  // Of a slot, or of a page.
    size_t bytes;
  };
  std::vector<Cache> caches;
  for (const Tensor& tensor : kv) {
    STD_TORCH_CHECK(tensor.is_contiguous(), "speccompile::move_path_: KV lies side by side");
    const int64_t slot_count = tensor.size(0), places = tensor.size(1);
    caches.push_back(
        {static_cast<char*>(tensor.data_ptr()), places,
         tensor.numel() / (slot_count * places) * tensor.element_size()});
  }
  const int64_t *slot_of = numbers(own_slots), *roots = numbers(own_root), *paths = numbers(own_path),
                *counts = numbers(own_accepted), *table = own_pages ? numbers(*own_pages) : nullptr;
  const int64_t table_size = own_pages ? own_pages->size(1) : 0;
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          STD_TORCH_CHECK(counts[row] < width, "speccompile::move_path_: more drafts than the path has");
        }
        for (const Cache& cache : caches) {
          for (int64_t row = 0; row < rows; ++row) {
            const auto at = [&](int64_t node) {
              const int64_t place = roots[row] + node;
              const int64_t piece =
                  table ? table[slot_of[row] * table_size + place / cache.places] : slot_of[row];
              return cache.from + (piece * cache.places + (table ? place % cache.places : place)) * cache.bytes;
            };
            // A node never stands before its depth, so no place is read after it was written.
            for (int64_t depth = 1; depth <= counts[row]; ++depth) {
              const int64_t node = paths[row * width + depth];
              if (node != depth) {
                std::memcpy(at(depth), at(node), cache.bytes);
              }
            }
          }
        }
      },
      slots.is_contiguous() && root.is_contiguous() && path.is_contiguous() && accepted.is_contiguous() &&
          (!pages || pages->is_contiguous()));
}

std::tuple<Tensor, Tensor, Tensor> merge_trees_op(
    const std::vector<Tensor>& tokens, const std::vector<Tensor>& parents, const std::vector<Tensor>& counts,
    const std::vector<Tensor>& scores, int64_t nodes) {
  const size_t trees = tokens.size();
  STD_TORCH_CHECK(
      trees > 0 && parents.size() == trees && counts.size() == trees && scores.size() == trees,
      "speccompile::merge_trees: each tree has tokens, parents, a count and scores");
  const int64_t rows = tokens[0].size(0);
  struct Proposal {
    const int64_t *tokens, *parents, *counts;
    const float* scores;
    int64_t width;
  };
  std::vector<Tensor> given;
  std::vector<Proposal> proposals;
  bool repeatable = true;
  const auto kept = [&](const Tensor& tensor) -> const Tensor& {
    repeatable &= tensor.is_contiguous();
    return given.emplace_back(side_by_side(tensor));
  };
  given.reserve(4 * trees);
  for (size_t tree = 0; tree < trees; ++tree) {
    const int64_t width = tokens[tree].size(1);
    STD_TORCH_CHECK(
        scores[tree].scalar_type() == ScalarType::Float && scores[tree].numel() == rows * width &&
            tokens[tree].numel() == rows * width && parents[tree].numel() == rows * width && counts[tree].numel() == rows,
        "speccompile::merge_trees: scores are float32, and the sizes are those of the tokens");
    proposals.push_back(
        {numbers(kept(tokens[tree])), numbers(kept(parents[tree])), numbers(kept(counts[tree])),
         static_cast<const float*>(kept(scores[tree]).data_ptr()), width});
  }
  const Tensor found = new_integers({rows, nodes}), above = new_integers({rows, nodes}), count = new_integers({rows});
  int64_t *to = numbers(found), *to_parents = numbers(above), *to_count = numbers(count);
  run_kernel(
      [=] {
        std::fill_n(to, rows * nodes, int64_t{0});
        std::fill_n(to_parents, rows * nodes, int64_t{0});
        for (int64_t row = 0; row < rows; ++row) {
          PathTree all;
          for (const Proposal& from : proposals) {
            const int64_t *token = from.tokens + row * from.width, *parent = from.parents + row * from.width;
            const float* score = from.scores + row * from.width;
            std::vector<int64_t> node_of{0};
            for (int64_t i = 0; i < std::min(from.counts[row], from.width); ++i) {
              STD_TORCH_CHECK(
                  parent[i] >= 0 && parent[i] <= i, "speccompile::merge_trees: a parent comes before its child");
              all.go_to(node_of[parent[i]]);
              all.add(token[i], score[i]);
              node_of.push_back(all.here());
            }
          }
          to_count[row] = all.finish(nodes, to + row * nodes, to_parents + row * nodes, nullptr);
        }
      },
      repeatable);
  return {found, above, count};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("fit_tree", TORCH_BOX(&fit_tree_op));
  m.impl("walk_tree", TORCH_BOX(&walk_tree_op));
  m.impl("move_path_", TORCH_BOX(&move_path_op));
  m.impl("merge_trees", TORCH_BOX(&merge_trees_op));
}

}  // namespace
}  // namespace speccompile
