// Recurrences, place by place. The order of every sum is that of its terms, whatever the width of the step and the
// threads, so a state has the same bits however many tokens each step accepted.
#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace speccompile {
namespace {

// Sums over the places of a state are cut into so many chains.
constexpr int64_t kScanChains = 8;

// The state after the places of a row: `advance` takes the kept inputs of a place, or its number in the step, and `read`
// is called after each place of the step. What is settled is written to `state`, of `size` numbers.
template <typename AdvanceKept, typename Advance, typename Read>
void scan_places(
    const RowPlaces& at, int64_t width, float* state, float* now, int64_t size, AdvanceKept advance_kept,
    Advance advance, Read read) {
  if (at.absorbed > 0) {
    std::memcpy(now, state, size * sizeof(float));
  } else {
    std::fill_n(now, size, 0.0f);
  }
  for (int64_t position = at.absorbed; position < at.first; ++position) {
    advance_kept(position);
  }
  for (int64_t place = 0; place <= width; ++place) {
    if (at.first + place == at.settled) {
      std::memcpy(state, now, size * sizeof(float));
    }
    if (place < width) {
      advance(place);
      read(place);
    }
  }
}

// k, v, gate and beta of one head at one place.
struct DeltaInputs {
  const float *key, *value, *gate;
  float beta;
};

void advance_delta(const DeltaRule& problem, const DeltaInputs& inputs, float* now, float* change) {
  const int64_t depth = problem.depth, wide = problem.value_depth;
  std::fill_n(change, wide, 0.0f);
  float decay = std::exp(inputs.gate[0]);
  for (int64_t d = 0; d < depth; ++d) {
    if (problem.gates > 1) {
      decay = std::exp(inputs.gate[d]);
    }
    const float key = inputs.key[d];
    float* line = now + d * wide;
    for (int64_t i = 0; i < wide; ++i) {
      line[i] *= decay;
      change[i] += line[i] * key;
    }
  }
  for (int64_t i = 0; i < wide; ++i) {
    change[i] = (inputs.value[i] - change[i]) * inputs.beta;
  }
  for (int64_t d = 0; d < depth; ++d) {
    const float key = inputs.key[d];
    float* line = now + d * wide;
    for (int64_t i = 0; i < wide; ++i) {
      line[i] += key * change[i];
    }
  }
}

void read_delta(const DeltaRule& problem, const float* now, const float* query, float* out) {
  const int64_t wide = problem.value_depth;
  std::fill_n(out, wide, 0.0f);
  for (int64_t d = 0; d < problem.depth; ++d) {
    const float* line = now + d * wide;
    for (int64_t i = 0; i < wide; ++i) {
      out[i] += line[i] * query[d];
    }
  }
}

// x, dt and B of one head at one place.
struct ScanInputs {
  const float* x;
  float dt;
  const float* b;
};

void advance_scan(const SelectiveScan& problem, const ScanInputs& inputs, const float* a, float* now, float* decay) {
  const int64_t size = problem.size;
  for (int64_t m = 0; m < problem.decays; ++m) {
    decay[m] = std::exp(inputs.dt * a[m]);
  }
  for (int64_t p = 0; p < problem.depth; ++p) {
    const float added = inputs.dt * inputs.x[p];
    float* line = now + p * size;
    if (problem.decays > 1) {
      for (int64_t m = 0; m < size; ++m) {
        line[m] = line[m] * decay[m] + added * inputs.b[m];
      }
    } else {
      const float one = decay[0];
      for (int64_t m = 0; m < size; ++m) {
        line[m] = line[m] * one + added * inputs.b[m];
      }
    }
  }
}

float dot_product(const float* one, const float* other, int64_t size) {
  float chains[kScanChains] = {};
  const int64_t whole = size - size % kScanChains;
  for (int64_t m = 0; m < whole; m += kScanChains) {
    for (int64_t i = 0; i < kScanChains; ++i) {
      chains[i] += one[m + i] * other[m + i];
    }
  }
  float sum = 0.0f;
  for (float chain : chains) {
    sum += chain;
  }
  for (int64_t m = whole; m < size; ++m) {
    sum += one[m] * other[m];
  }
  return sum;
}

float* scan_memory(int64_t size) {
  thread_local std::vector<float> memory;
  memory.resize(std::max<size_t>(memory.size(), size));
  return memory.data();
}

}  // namespace

void convolve(const CausalConv& problem, const RowPlaces& at, int64_t row, int64_t begin, int64_t end) {
  const int64_t count = end - begin, channels = problem.channels, window = problem.window;
  // The taps of all channels side by side.
  float* taps = scan_memory(window * count);
  for (int64_t tap = 0; tap < window; ++tap) {
    for (int64_t i = 0; i < count; ++i) {
      taps[tap * count + i] = problem.weight[(begin + i) * window + tap];
    }
  }
  for (int64_t place = 0; place < problem.width; ++place) {
    float* out = problem.out + (row * problem.width + place) * channels + begin;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = problem.bias ? problem.bias[begin + i] : 0.0f;
    }
    for (int64_t tap = 0; tap < window; ++tap) {
      const int64_t position = at.first + place - window + 1 + tap;
      if (position < 0) {
        continue;
      }
      const float* from = position >= at.first
          ? problem.x + (row * problem.width + position - at.first) * channels
          : problem.kept + (at.slot * problem.kept_places + position % problem.kept_places) * channels;
      const float* weights = taps + tap * count;
      for (int64_t i = 0; i < count; ++i) {
        out[i] += weights[i] * from[begin + i];
      }
    }
  }
}

void apply_delta_rule(const DeltaRule& problem, const RowPlaces& at, int64_t row, int64_t head) {
  const int64_t depth = problem.depth, wide = problem.value_depth, heads = problem.heads, size = depth * wide;
  const int64_t group = head / (heads / problem.groups), gates = problem.gates;
  float *now = scan_memory(size + wide), *change = now + size;
  const auto advance_kept = [&](int64_t position) {
    const float* kept = problem.kept + (at.slot * problem.kept_places + position % problem.kept_places) * problem.inputs();
    const float *values = kept + problem.groups * depth, *all_gates = values + heads * wide, *betas = all_gates + heads * gates;
    const DeltaInputs inputs{kept + group * depth, values + head * wide, all_gates + head * gates, betas[head]};
    advance_delta(problem, inputs, now, change);
  };
  const auto advance = [&](int64_t place) {
    const int64_t token = row * problem.width + place, of_head = token * heads + head;
    const DeltaInputs inputs{
        problem.k + (token * problem.groups + group) * depth, problem.v + of_head * wide, problem.gate + of_head * gates,
        problem.beta[of_head]};
    advance_delta(problem, inputs, now, change);
  };
  const auto read = [&](int64_t place) {
    const int64_t token = row * problem.width + place;
    const float* query = problem.q + (token * problem.groups + group) * depth;
    read_delta(problem, now, query, problem.out + (token * heads + head) * wide);
  };
  float* state = problem.state + (at.slot * heads + head) * size;
  scan_places(at, problem.width, state, now, size, advance_kept, advance, read);
}

void apply_selective_scan(const SelectiveScan& problem, const RowPlaces& at, int64_t row, int64_t head) {
  const int64_t depth = problem.depth, heads = problem.heads, size = depth * problem.size;
  const int64_t group = head / (heads / problem.groups);
  float *now = scan_memory(size + problem.decays), *decay = now + size;
  const float* a = problem.a + head * problem.decays;
  const auto advance_kept = [&](int64_t position) {
    const float* kept = problem.kept + (at.slot * problem.kept_places + position % problem.kept_places) * problem.inputs();
    const float *steps = kept + heads * depth, *all_b = steps + heads;
    advance_scan(problem, {kept + head * depth, steps[head], all_b + group * problem.size}, a, now, decay);
  };
  const auto advance = [&](int64_t place) {
    const int64_t token = row * problem.width + place, of_head = token * heads + head;
    const float* b = problem.b + (token * problem.groups + group) * problem.size;
    advance_scan(problem, {problem.x + of_head * depth, problem.dt[of_head], b}, a, now, decay);
  };
  const auto read = [&](int64_t place) {
    const int64_t token = row * problem.width + place;
    const float* c = problem.c + (token * problem.groups + group) * problem.size;
    float* out = problem.out + (token * heads + head) * depth;
    for (int64_t p = 0; p < depth; ++p) {
      out[p] = dot_product(now + p * problem.size, c, problem.size);
    }
  };
  float* state = problem.state + (at.slot * heads + head) * size;
  scan_places(at, problem.width, state, now, size, advance_kept, advance, read);
}

}  // namespace speccompile
