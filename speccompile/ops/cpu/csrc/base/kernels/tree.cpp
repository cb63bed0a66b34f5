// speccompile/ops/tree.py, row by row.
#include "tree.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace speccompile {
namespace {

constexpr int64_t kNotTaken = -1;

int64_t node_of(const TreeShape& shape, int64_t parent, int64_t rank) {
  for (int64_t node = 0; node < shape.nodes; ++node) {
    if (shape.parents[node] == parent && shape.ranks[node] == rank) {
      return node + 1;
    }
  }
  return kNotTaken;
}

}  // namespace

void PathTree::add(int64_t token, double chance) {
  size_t at = 0;
  while (at < nodes_.size() && !(nodes_[at].parent == parent_ && nodes_[at].token == token)) {
    ++at;
  }
  if (at == nodes_.size()) {
    nodes_.push_back({token, parent_, 0.0});
  }
  // Scores are rounded, and no child is likelier than its parent.
  const double most = parent_ == 0 ? chance : std::min(chance, nodes_[parent_ - 1].chance);
  nodes_[at].chance = std::max(nodes_[at].chance, most);
  parent_ = static_cast<int64_t>(at) + 1;
}

int64_t PathTree::finish(int64_t most, int64_t* tokens, int64_t* parents, float* scores) const {
  std::vector<int64_t> order(nodes_.size()), number(nodes_.size() + 1, 0);
  std::iota(order.begin(), order.end(), 0);
  // Stable, and no child is likelier than its parent: so no token is before its parent.
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) {
    return nodes_[one].chance > nodes_[other].chance;
  });
  const int64_t count = std::min<int64_t>(most, static_cast<int64_t>(order.size()));
  for (int64_t i = 0; i < count; ++i) {
    const Node& node = nodes_[order[i]];
    number[order[i] + 1] = i + 1;
    tokens[i] = node.token;
    parents[i] = number[node.parent];
    if (scores != nullptr) {
      scores[i] = static_cast<float>(node.chance);
    }
  }
  return count;
}

int64_t fit_tree(
    const int64_t* tokens, const int64_t* parents, int64_t count, const TreeShape& shape, const FittedTree& out) {
  std::fill_n(out.drafts, shape.nodes, -1);
  std::fill_n(out.parents, shape.nodes + 1, 0);
  std::fill_n(out.depths, shape.nodes + 1, 1);
  out.parents[0] = -1;
  out.depths[0] = 0;
  if (shape.parents != nullptr) {
    for (int64_t node = 1; node <= shape.nodes; ++node) {
      out.parents[node] = shape.parents[node - 1];
      out.depths[node] = out.depths[out.parents[node]] + 1;
    }
  }
  thread_local std::vector<int64_t> children, taken;
  children.assign(count + 1, 0);
  taken.assign(count + 1, kNotTaken);
  taken[0] = 0;
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = taken[parents[i]], rank = children[parents[i]]++;
    if (parent == kNotTaken || tokens[i] < 0) {
      continue;
    }
    int64_t node = kNotTaken;
    if (shape.parents != nullptr) {
      node = node_of(shape, parent, rank);
    } else if (found < shape.nodes && rank < shape.branches && out.depths[parent] < shape.depth) {
      node = found + 1;
    }
    if (node == kNotTaken) {
      continue;
    }
    taken[i + 1] = node;
    out.drafts[node - 1] = tokens[i];
    out.parents[node] = parent;
    out.depths[node] = out.depths[parent] + 1;
    ++found;
  }
  return found;
}

int64_t walk_tree(
    const int64_t* target, const int64_t* drafts, const int64_t* parents, int64_t nodes, int64_t depth, int64_t* path) {
  int64_t now = 0, accepted = 0;
  std::fill_n(path, depth + 1, 0);
  // Parents come before children, so one look at each node is enough.
  for (int64_t node = 1; node <= nodes && accepted < depth; ++node) {
    if (parents[node] == now && drafts[node - 1] == target[now] && target[now] >= 0) {
      now = node;
      path[++accepted] = now;
    }
  }
  std::fill(path + accepted + 1, path + depth + 1, now);
  return accepted;
}

}  // namespace speccompile
