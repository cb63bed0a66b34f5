// The greatest scores of a place. Most blocks of scores hold none of them, as their own greatest shows.
#include "choose.h"

#include "tile.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace speccompile {
namespace {

constexpr int64_t kSmallest = kLanes > 16 ? kLanes : 16;
constexpr int64_t kLargest = 256;
// Blocks for each score that is wanted: a bar that so many of them reach lets little else through.
constexpr int64_t kBlocks = 3;
constexpr int64_t kChains = 4;
constexpr int64_t kLinks = 16;

float greatest_in(const float* from, int64_t count) {
  int64_t i = 0;
  float greatest = kForbidden;
  if (count >= kLanes) {
    Vec lanes = Vec::loadu(from);
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      lanes = at::vec::maximum(lanes, Vec::loadu(from + i));
    }
    greatest = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, lanes);
  }
  for (; i < count; ++i) {
    greatest = std::isnan(from[i]) || from[i] > greatest ? from[i] : greatest;
  }
  return greatest;
}

bool before(float a, float b) {
  return a > b || (std::isnan(a) && !std::isnan(b));
}

}  // namespace

void greatest_of(const float* scores, int64_t vocab, int64_t count, float* out) {
  thread_local std::vector<float> maxima, sorted, found;
  const int64_t size = std::clamp(vocab / (kBlocks * count) / kSmallest * kSmallest, kSmallest, kLargest);
  const int64_t blocks = (vocab + size - 1) / size;
  maxima.resize(blocks);
  bool is_nan = false;
  for (int64_t block = 0; block < blocks; ++block) {
    maxima[block] = greatest_in(scores + block * size, std::min(size, vocab - block * size));
    is_nan = is_nan || std::isnan(maxima[block]);
  }
  found.clear();
  if (is_nan) {
    found.assign(scores, scores + vocab);
  } else {
    // At least `count` scores reach the bar: one in each of so many blocks.
    float bar = kForbidden;
    if (count <= blocks) {
      sorted = maxima;
      std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
      bar = sorted[count - 1];
    }
    for (int64_t block = 0; block < blocks; ++block) {
      if (maxima[block] < bar || maxima[block] == kForbidden) {
        continue;
      }
      const float* const end = scores + std::min((block + 1) * size, vocab);
      for (const float* score = scores + block * size; score < end; ++score) {
        if (*score >= bar && *score != kForbidden) {
          found.push_back(*score);
        }
      }
    }
    found.resize(std::max<int64_t>(found.size(), count), kForbidden);
  }
  if (static_cast<int64_t>(found.size()) > count) {
    std::nth_element(found.begin(), found.begin() + count - 1, found.end(), before);
  }
  std::sort(found.begin(), found.begin() + count, before);
  std::copy_n(found.begin(), count, out);
}

float greatest_share(const float* scores, int64_t vocab) {
  const float most = greatest_in(scores, vocab);
  const Vec shift(most);
  // Chains of additions whose order depends on nothing but the vocabulary's size; short ones, for rounding adds up along a chain.
  Vec total(0.0f);
  int64_t i = 0;
  while (i + kChains * kLanes <= vocab) {
    Vec chains[kChains] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
    for (int64_t link = 0; link < kLinks && i + kChains * kLanes <= vocab; ++link, i += kChains * kLanes) {
      for (int64_t chain = 0; chain < kChains; ++chain) {
        chains[chain] = chains[chain] + (Vec::loadu(scores + i + chain * kLanes) - shift).exp();
      }
    }
    total = total + ((chains[0] + chains[1]) + (chains[2] + chains[3]));
  }
  float sum = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, total);
  for (; i < vocab; ++i) {
    sum += std::exp(scores[i] - most);
  }
  return 1.0f / sum;
}

void cut_below(float* scores, int64_t vocab, float threshold) {
  int64_t i = 0;
  const Vec bar(threshold), none(kForbidden);
  for (; i + kLanes <= vocab; i += kLanes) {
    const Vec score = Vec::loadu(scores + i);
    Vec::blendv(score, none, score < bar).store(scores + i);
  }
  for (; i < vocab; ++i) {
    scores[i] = scores[i] < threshold ? kForbidden : scores[i];
  }
}

}  // namespace speccompile
