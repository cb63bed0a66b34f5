// speccompile.ops.successors: rows of a table are written, and followed from the likeliest path on.
#include "successors.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace speccompile {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
// As speccompile/ops/successors.py has them.
constexpr int64_t kFirst = 0x9E3779B1, kSecond = 0x85EBCA77;

void write(const Successors& table, int64_t row, const int64_t* best, const float* best_logprobs) {
  for (int64_t i = 0; i < table.width; ++i) {
    table.tokens[row * table.width + i] = static_cast<int32_t>(best[i] + 1);
    table.logprobs[row * table.width + i] = best_logprobs[i];
  }
}

}  // namespace

int64_t Successors::place_of(int64_t first, int64_t second) const {
  const int64_t mixed = first * kFirst + second * kSecond;
  return (mixed ^ (mixed >> 16)) % pairs;
}

void Successors::store(
    int64_t first, int64_t token, const int64_t* best, const float* best_logprobs, bool fills) const {
  if (token < 0 || token >= vocab) {
    return;
  }
  if (!fills || tokens[token * width] == 0) {
    write(*this, token, best, best_logprobs);
  }
  if (pairs == 0 || first < 0 || first >= vocab) {
    return;
  }
  const int64_t place = place_of(first, token);
  if (!fills || keys[place] == 0) {
    keys[place] = first * vocab + token + 1;
    write(*this, vocab + place, best, best_logprobs);
  }
}

int64_t Successors::row_of(int64_t first, int64_t token) const {
  if (pairs > 0 && first >= 0) {
    const int64_t place = place_of(first, token);
    if (keys[place] == first * vocab + token + 1) {
      return vocab + place;
    }
  }
  return token;
}

int64_t follow(
    const Successors& table, int64_t first, int64_t token, int64_t branches, float least, const Followed& to) {
  // Candidate c is successor c % branches of node c / branches; node 0 is the newest token.
  thread_local std::vector<int64_t> tokens;
  thread_local std::vector<float> logprobs;
  thread_local std::vector<int64_t> path;
  tokens.clear();
  logprobs.clear();
  path.assign(1, token);
  float total = 0.0f;
  int64_t found = 0;
  for (; found < to.count; ++found) {
    const bool known = token >= 0 && token < table.vocab;
    const int64_t row = known ? table.row_of(first, token) * table.width : 0;
    for (int64_t i = 0; i < branches; ++i) {
      const int64_t after = known ? static_cast<int64_t>(table.tokens[row + i]) - 1 : -1;
      tokens.push_back(after);
      logprobs.push_back(after >= 0 ? total + table.logprobs[row + i] : kNever);
    }
    const auto best = std::max_element(logprobs.begin(), logprobs.end());
    if (!(*best >= least && *best > kNever)) {
      break;
    }
    const int64_t candidate = best - logprobs.begin(), parent = candidate / branches;
    total = *best;
    *best = kNever;
    first = path[parent];
    token = tokens[candidate];
    path.push_back(token);
    to.drafts[found] = token;
    to.parents[found] = parent;
    to.logprobs[found] = total;
  }
  std::fill(to.drafts + found, to.drafts + to.count, 0);
  std::fill(to.parents + found, to.parents + to.count, 0);
  std::fill(to.logprobs + found, to.logprobs + to.count, kNever);
  return found;
}

}  // namespace speccompile
