// The token of a place: the greatest score, or score and noise, which is made where it is added. Ids that cannot come are
// passed over. The integers are those of speccompile/ops/noise.py; Gumbels of them agree to a few ulp.
#include "choose.h"

#include "noise.h"
#include "tile.h"

#include <algorithm>
#include <cmath>

namespace speccompile {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
// Four times what two Gumbels can differ by, each of them right to 4 ulp.
constexpr float kDoubt = 6e-5f;
// The greatest Gumbel, of the least uniform, is 22.18.
constexpr float kMostNoise = 22.2f;

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

bool all_lanes(const Vec& mask) {
  return mask.zero_mask() == 0;
}

bool any_lane(const Vec& mask) {
  return mask.zero_mask() != (1 << kLanes) - 1;
}

// Lanes above the bar. A NaN always is.
Vec may_matter(const Vec& value, float bar) {
  return (value > Vec(bar)) | (value != value);
}

// The lanes of a place so far.
struct Lanes {
  Vec top{kForbidden}, second{kForbidden}, chosen{0.0f}, spoiled{0.0f};

  void see(const Vec& value, const Vec& ids) {
    spoiled = spoiled | (value != value);
    const Vec greater = value > top;
    second = at::vec::maximum(second, at::vec::minimum(top, value));
    chosen = Vec::blendv(chosen, ids, greater);
    top = Vec::blendv(top, value, greater);
  }

  // What is not above it changes nothing: neither what is best nor, with noise, whether another one is close to that.
  float bar(bool noisy) const {
    const float best = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, top);
    return noisy && best > kForbidden ? best - 1.0f - 0x1p-20f * std::abs(best) : best;
  }

  Best best() const {
    float tops[kLanes], seconds[kLanes], ids[kLanes];
    top.store(tops);
    second.store(seconds);
    chosen.store(ids);
    Best found;
    found.is_nan = any_lane(spoiled);
    int64_t at = 0;
    for (int64_t lane = 1; lane < kLanes; ++lane) {
      if (tops[lane] > tops[at] || (tops[lane] == tops[at] && ids[lane] < ids[at])) {
        at = lane;
      }
    }
    found.top = tops[at];
    found.token = static_cast<int64_t>(ids[at]);
    found.second = seconds[at];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (lane != at) {
        found.second = std::max(found.second, tops[lane]);
      }
    }
    return found;
  }
};

template <typename T>
Best best_typed(const T* scores, int64_t first, int64_t last, std::optional<uint64_t> key, int64_t token) {
  float steps[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    steps[lane] = static_cast<float>(lane);
  }
  const Vec lane_ids = Vec::loadu(steps);
  Lanes lanes;
  float bar = kForbidden;
  for (int64_t at = first; at < last; at += kChunk) {
    Vec values[kChunkVecs];
    if (at + kChunk <= last) {
      Loader<T>::template load<kChunkVecs>(scores + at, values);
    } else {
      float rest[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) {
        rest[i] = at + i < last ? static_cast<float>(scores[at + i]) : kForbidden;
      }
      Loader<float>::load<kChunkVecs>(rest, values);
    }
    Vec greatest = values[0];
    for (int v = 1; v < kChunkVecs; ++v) {
      greatest = at::vec::maximum(greatest, values[v]);
    }
    if (!any_lane(may_matter(key ? greatest + Vec(kMostNoise) : greatest, bar))) {
      continue;
    }
    if (key) {
      float drawn[kChunk];
      uniforms(*key, token + at, drawn);
      Vec least = Vec::loadu(drawn);
      for (int v = 1; v < kChunkVecs; ++v) {
        least = at::vec::minimum(least, Vec::loadu(drawn + v * kLanes));
      }
      if (!any_lane(may_matter(greatest + gumbel_of(least), bar))) {
        continue;
      }
      for (int v = 0; v < kChunkVecs; ++v) {
        values[v] = values[v] + gumbel_of(Vec::loadu(drawn + v * kLanes));
      }
    }
    for (int v = 0; v < kChunkVecs; ++v) {
      lanes.see(values[v], lane_ids + Vec(static_cast<float>(at + v * kLanes)));
    }
    bar = lanes.bar(key.has_value());
  }
  return lanes.best();
}

}  // namespace

uint64_t key_of(int64_t seed, int64_t stream, int64_t position, std::optional<int64_t> start) {
  uint64_t key = mix64(static_cast<uint64_t>(seed) + kGolden);
  key = mix64(key + (static_cast<uint64_t>(position) + 1) * kGolden);
  key = mix64(key + (static_cast<uint64_t>(stream) + 1) * kGolden);
  return start ? mix64(key + (static_cast<uint64_t>(*start) + 1) * kGolden) : key;
}

Best best_of(Type type, const void* scores, int64_t first, int64_t last, std::optional<uint64_t> key, int64_t token) {
  switch (type) {
    case Type::Float:
      return best_typed(static_cast<const float*>(scores), first, last, key, token);
    case Type::BFloat16:
      return best_typed(static_cast<const c10::BFloat16*>(scores), first, last, key, token);
    case Type::Half:
      return best_typed(static_cast<const c10::Half*>(scores), first, last, key, token);
  }
  return {};
}

Best join(const Best& best, const Best& later) {
  Best joined = later.top > best.top ? later : best;
  joined.second = std::max(std::max(best.second, later.second), std::min(best.top, later.top));
  joined.is_nan = best.is_nan || later.is_nan;
  return joined;
}

bool is_close(const Best& best) {
  return best.second > kForbidden && best.top - best.second <= kDoubt + 4 * 0x1p-23f * std::abs(best.top);
}

}  // namespace speccompile
