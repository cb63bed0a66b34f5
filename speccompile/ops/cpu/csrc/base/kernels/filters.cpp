// Temperature, top-k, top-p and min-p of one place: scores below a threshold are removed.
#include "filters.h"

#include "tile.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace speccompile {
namespace {

// speccompile/ops/tolerances.py.
constexpr float kRounding = 0x1p-22f;
constexpr float kMinPRounding = 0x1p-18f;
// speccompile/ops/greatest.py, SEARCH_SIZES.
constexpr int64_t kSearchSizes[] = {256, 4096};

template <typename T>
void divide_typed(const T* scores, int64_t first, int64_t last, float divisor, float* to) {
  const Vec by(divisor);
  int64_t at = first;
  for (; at + 2 * kLanes <= last; at += 2 * kLanes) {
    Vec values[2];
    Loader<T>::template load<2>(scores + at, values);
    (values[0] / by).store(to + at);
    (values[1] / by).store(to + at + kLanes);
  }
  for (; at < last; ++at) {
    to[at] = static_cast<float>(scores[at]) / divisor;
  }
}

float lane(const Vec& value) {
  float lanes[kLanes];
  value.store(lanes);
  return lanes[0];
}

float top_k_threshold(const float* scores, int64_t vocab, int64_t top_k) {
  thread_local std::vector<float> found;
  const int64_t count = std::min(top_k, vocab);
  found.resize(count);
  greatest_of(scores, vocab, count, found.data());
  return found[count - 1];
}

}  // namespace

void divide(Type type, const void* scores, int64_t first, int64_t last, float temperature, float* to) {
  const float divisor = temperature == 0.0f ? 1.0f : temperature;
  switch (type) {
    case Type::Float:
      return divide_typed(static_cast<const float*>(scores), first, last, divisor, to);
    case Type::BFloat16:
      return divide_typed(static_cast<const c10::BFloat16*>(scores), first, last, divisor, to);
    case Type::Half:
      return divide_typed(static_cast<const c10::Half*>(scores), first, last, divisor, to);
  }
}

float top_p_threshold(const float* scores, int64_t vocab, float top_p) {
  if (!(top_p < 1.0f)) {
    return -std::numeric_limits<float>::infinity();
  }
  thread_local std::vector<float> found;
  const float share = greatest_share(scores, vocab), enough = top_p - kRounding;
  for (const int64_t wanted : {kSearchSizes[0], kSearchSizes[1], vocab}) {
    const int64_t size = std::min(wanted, vocab);
    found.resize(size);
    greatest_of(scores, vocab, size, found.data());
    // A score stays if the scores before it do not reach p; the greatest one stays.
    double before = 0.0;
    int64_t count = 0;
    for (; count < size && (count == 0 || static_cast<float>(before) < enough); ++count) {
      before += static_cast<double>(lane(Vec(found[count] - found[0]).exp()) * share);
    }
    if (count < size || size == vocab) {
      return found[count - 1];
    }
  }
  return -std::numeric_limits<float>::infinity();
}

float min_p_threshold(const float* scores, int64_t vocab, float min_p) {
  float most;
  greatest_of(scores, vocab, 1, &most);
  return most + lane(Vec(min_p).log()) - kMinPRounding;
}

void filter(float* scores, int64_t vocab, const Filters& filters) {
  if (filters.top_k > 0) {
    cut_below(scores, vocab, top_k_threshold(scores, vocab, filters.top_k));
  }
  if (filters.top_p < 1.0f) {
    cut_below(scores, vocab, top_p_threshold(scores, vocab, filters.top_p));
  }
  if (filters.min_p > 0.0f) {
    cut_below(scores, vocab, min_p_threshold(scores, vocab, filters.min_p));
  }
}

}  // namespace speccompile
