// Tries of all substrings of texts, for suffix decoding. The definition is speccompile/ops/suffix_trie.py: the same
// nodes at the same places, and the same drafts.
#include "suffix.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <vector>

namespace speccompile {

int64_t Speculation::most(int64_t matched, int64_t longest) const {
  const auto wanted = static_cast<int64_t>(static_cast<double>(matched) * factor + offset + 1e-6);
  return std::min({longest, wanted, depth - matched});
}

Trie::Trie(int32_t* used, int32_t* nodes, int64_t capacity, int32_t* index, int64_t places)
    : used_(used), nodes_(nodes), parent_(nodes), token_(nodes + capacity), count_(nodes + 2 * capacity),
      best_(nodes + 3 * capacity), next_(nodes + 4 * capacity), index_(index), capacity_(capacity), places_(places) {}

void Trie::clear() {
  std::memset(used_, 0, 2 * sizeof(int32_t));
  std::memset(nodes_, 0, kFields * capacity_ * sizeof(int32_t));
  std::memset(index_, 0, places_ * sizeof(int32_t));
}

int64_t Trie::place_of(int32_t parent, int32_t token) const {
  const uint64_t hash = static_cast<uint64_t>(parent) * 0x9E3779B1u + static_cast<uint64_t>(token) * 0x85EBCA6Bu;
  auto place = static_cast<int64_t>(hash % static_cast<uint64_t>(places_));
  for (int32_t node = index_[place]; node != 0; node = index_[place]) {
    if (parent_[node] == parent && token_[node] == token) {
      break;
    }
    place = place + 1 < places_ ? place + 1 : 0;
  }
  return place;
}

int32_t Trie::child_of(int32_t parent, int32_t token) {
  const int64_t place = place_of(parent, token);
  if (index_[place] == 0) {
    const int32_t node = ++used_[1];
    index_[place] = node;
    parent_[node] = parent;
    token_[node] = token;
  }
  return index_[place];
}

void Trie::list(int32_t parent, int32_t child) {
  int32_t* place = &best_[parent];
  int64_t before = 0;
  for (; *place != 0 && *place != child && count_[*place] > count_[child]; place = &next_[*place]) {
    ++before;
  }
  if (*place == child || before == kListed) {
    return;
  }
  // Where the child is listed, or the last one that is.
  int32_t *at = place, *last = place;
  int64_t listed = before;
  for (; *at != 0 && *at != child; at = &next_[*at]) {
    last = at;
    ++listed;
  }
  if (*at == child) {
    *at = next_[child];
  } else if (listed == kListed) {
    *last = 0;
  }
  next_[child] = *place;
  *place = child;
}

void Trie::learn(int32_t* active, int64_t depth, int32_t token) {
  // Longest first: a child hangs on the suffix as it was without this token.
  for (int64_t at = depth; at > 0; --at) {
    const int32_t parent = active[at - 1];
    if (at > 1 && parent == 0) {
      continue;
    }
    const int32_t child = child_of(parent, token);
    ++count_[child];
    list(parent, child);
    active[at] = child;
  }
  ++used_[0];
}

void Trie::follow(int32_t* active, int64_t depth, int32_t token) const {
  for (int64_t at = depth; at > 0; --at) {
    const int32_t parent = active[at - 1];
    active[at] = at == 1 || parent != 0 ? index_[place_of(parent, token)] : 0;
  }
}

// Calls visit(token, cumulative probability) of each draft.
template <typename Visit>
int64_t Trie::path(int32_t node, int64_t most, double least, Visit visit) const {
  double chance = 1.0;
  int64_t found = 0;
  for (int32_t child = best_[node]; found < most && child != 0; child = best_[child]) {
    chance *= static_cast<double>(count_[child]) / static_cast<double>(count_[node]);
    if (chance < least) {
      break;
    }
    visit(token_[child], chance);
    ++found;
    node = child;
  }
  return found;
}

int64_t Trie::propose(
    const int32_t* active, int64_t longest, const Speculation& speculation, int64_t* drafts, float* scores,
    double& expected) const {
  int64_t best_match = 0;
  expected = 0.0;
  for (int64_t matched = 1; matched < speculation.depth; ++matched) {
    if (active[matched] == 0) {
      continue;
    }
    double total = 0.0;
    const auto add = [&](int32_t, double chance) { total += chance; };
    if (path(active[matched], speculation.most(matched, longest), speculation.least, add) > 0 && total >= expected) {
      best_match = matched;
      expected = total;
    }
  }
  if (best_match == 0) {
    return 0;
  }
  const auto write = [&](int32_t token, double chance) {
    *drafts++ = token;
    *scores++ = static_cast<float>(chance);
  };
  return path(active[best_match], speculation.most(best_match, longest), speculation.least, write);
}

int64_t Trie::propose_tree(
    const int32_t* active, int64_t depth, int64_t most, int64_t* tokens, int64_t* parents, float* scores) const {
  struct Candidate {
    double chance;
    int64_t order, parent;
    int32_t node;

    // Of a priority queue the greatest comes first.
    bool operator<(const Candidate& other) const {
      return chance != other.chance ? chance < other.chance : order > other.order;
    }
  };
  std::priority_queue<Candidate> candidates;
  int64_t order = 0, found = 0;
  const auto expand = [&](int32_t node, int64_t parent, double chance) {
    for (int32_t child = best_[node]; child != 0; child = next_[child]) {
      const double share = chance * static_cast<double>(count_[child]) / static_cast<double>(count_[node]);
      candidates.push({share, order++, parent, child});
    }
  };
  std::vector<int32_t> matches;
  for (int64_t matched = 1; matched < depth; ++matched) {
    const int32_t node = active[matched];
    if (node == 0 || best_[node] == 0) {
      break;
    }
    if (matches.empty() || count_[node] < count_[matches.back()]) {
      matches.push_back(node);
    }
  }
  for (auto match = matches.rbegin(); match != matches.rend(); ++match) {
    expand(*match, 0, 1.0);
  }
  while (!candidates.empty() && found < most) {
    const Candidate next = candidates.top();
    candidates.pop();
    const int32_t token = token_[next.node];
    int64_t place = 0;
    while (place < found && !(parents[place] == next.parent && tokens[place] == token)) {
      ++place;
    }
    if (place == found) {
      tokens[found] = token;
      parents[found] = next.parent;
      scores[found] = static_cast<float>(next.chance);
      ++found;
    }
    expand(next.node, place + 1, next.chance);
  }
  return found;
}

}  // namespace speccompile
