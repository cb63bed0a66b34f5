// Recurrences, place by place. The order of every sum depends on the sizes of the state alone, not on the width of the
// step or the threads, so a state has the same bits however many tokens each step accepted.
#include "recurrence.h"

#include "../base/kernels/tile.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace speccompile {
namespace {

static_assert(kDeltaColumns == kColumns);

// A sum over the depth of a state is cut into so many chains: one alone would wait for its additions.
constexpr int kDeltaChains = kVecs == 2 ? 4 : 2;

// Goes over the places of a row: `absorb` takes the kept inputs of a position, `step` a place of the step, and `settle` is
// called where the state has absorbed what is settled.
template <typename Absorb, typename Step, typename Settle>
void scan_places(const RowPlaces& at, int64_t width, Absorb absorb, Step step, Settle settle) {
  for (int64_t position = at.absorbed; position < at.first; ++position) {
    absorb(position);
  }
  for (int64_t place = 0; place <= width; ++place) {
    if (at.first + place == at.settled) {
      settle();
    }
    if (place < width) {
      step(place);
    }
  }
}

// Of `count` numbers the first vector; zeros after the last of them.
inline Vec load_part(const float* from, int64_t count) {
  return count >= kLanes ? Vec::loadu(from) : Vec::loadu(from, std::max<int64_t>(count, 0));
}

inline void store_part(const Vec& value, float* to, int64_t count) {
  if (count >= kLanes) {
    value.store(to);
  } else if (count > 0) {
    value.store(to, count);
  }
}

// k, v, gate and beta of one head at one place.
struct DeltaInputs {
  const float *key, *value, *gate;
  float beta;
};

// kColumns columns of one head's state. Columns do not read one another, so these stay in the first-level cache while
// they go over all places.
struct DeltaColumns {
  int64_t depth, gates, count;
  float *now, *decay, *keys;  // [D, kColumns], [D], [D]

  void load(const float* state, int64_t stride) const {
    for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        load_part(state + d * stride + v * kLanes, count - v * kLanes).store(now + d * kColumns + v * kLanes);
      }
    }
  }

  void store(float* state, int64_t stride) const {
    for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        store_part(Vec::loadu(now + d * kColumns + v * kLanes), state + d * stride + v * kLanes, count - v * kLanes);
      }
    }
  }

  // With READ, `out` is what `query` finds afterwards.
  template <bool READ>
  void advance(const DeltaInputs& inputs, const float* query, float* out) const {
    weigh_keys(inputs);
    Vec change[kVecs], found[kDeltaChains][kVecs];
    recall(change);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      change[v] = (load_part(inputs.value + v * kLanes, count - v * kLanes) - change[v]) * Vec(inputs.beta);
#pragma GCC unroll 4
      for (int chain = 0; chain < kDeltaChains; ++chain) {
        found[chain][v] = Vec(0.0f);
      }
    }
    const int64_t whole = depth - depth % kDeltaChains;
    for (int64_t d = 0; d < whole; d += kDeltaChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kDeltaChains; ++chain) {
        update<READ>(inputs.key, query, d + chain, change, found[chain]);
      }
    }
    for (int64_t d = whole; d < depth; ++d) {
      update<READ>(inputs.key, query, d, change, found[0]);
    }
    if constexpr (READ) {
      join(found);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        store_part(found[0][v], out + v * kLanes, count - v * kLanes);
      }
    }
  }

 private:
  // The decay of each line, and keys for a state that has not decayed yet.
  void weigh_keys(const DeltaInputs& inputs) const {
    const float one = std::exp(inputs.gate[0]);
    for (int64_t d = 0; d < depth; d += kLanes) {
      const Vec decays = gates > 1 ? load_part(inputs.gate + d, depth - d).exp() : Vec(one);
      store_part(decays, decay + d, depth - d);
      store_part(decays * load_part(inputs.key + d, depth - d), keys + d, depth - d);
    }
  }

  // What the decayed state has under the key.
  void recall(Vec (&to)[kVecs]) const {
    Vec found[kDeltaChains][kVecs];
#pragma GCC unroll 4
    for (int chain = 0; chain < kDeltaChains; ++chain) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        found[chain][v] = Vec(0.0f);
      }
    }
    const int64_t whole = depth - depth % kDeltaChains;
    for (int64_t d = 0; d < whole; d += kDeltaChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kDeltaChains; ++chain) {
        add_line(d + chain, found[chain]);
      }
    }
    for (int64_t d = whole; d < depth; ++d) {
      add_line(d, found[0]);
    }
    join(found);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      to[v] = found[0][v];
    }
  }

  inline void add_line(int64_t d, Vec (&found)[kVecs]) const {
    const Vec key(keys[d]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      found[v] = at::vec::fmadd(key, Vec::loadu(now + d * kColumns + v * kLanes), found[v]);
    }
  }

  template <bool READ>
  inline void update(
      const float* key, const float* query, int64_t d, const Vec (&change)[kVecs], Vec (&found)[kVecs]) const {
    const Vec kept(decay[d]), added(key[d]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* const to = now + d * kColumns + v * kLanes;
      const Vec line = at::vec::fmadd(added, change[v], kept * Vec::loadu(to));
      line.store(to);
      if constexpr (READ) {
        found[v] = at::vec::fmadd(Vec(query[d]), line, found[v]);
      }
    }
  }

  static inline void join(Vec (&found)[kDeltaChains][kVecs]) {
#pragma GCC unroll 4
    for (int chain = 1; chain < kDeltaChains; ++chain) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        found[0][v] = found[0][v] + found[chain][v];
      }
    }
  }
};

// x, dt and B of one head at one place, and its decay where all places of a state have the same one.
struct ScanInputs {
  const float* x;
  float dt;
  const float* b;
  float decay;
};

// The state line [M] after a place; with READ, returns what `c` finds in it.
template <bool EACH, bool READ>
inline float advance_line(
    const ScanInputs& inputs, int64_t p, const float* a, const float* c, float* line, int64_t size) {
  const Vec added(inputs.dt * inputs.x[p]);
  Vec decay(inputs.decay), found(0.0f);
  for (int64_t m = 0; m < size; m += kLanes) {
    if constexpr (EACH) {
      decay = (Vec(inputs.dt) * load_part(a + m, size - m)).exp();
    }
    const Vec now = at::vec::fmadd(added, load_part(inputs.b + m, size - m), decay * Vec::loadu(line + m));
    now.store(line + m);
    if constexpr (READ) {
      found = at::vec::fmadd(load_part(c + m, size - m), now, found);
    }
  }
  return READ ? at::vec::vec_reduce_all<float>([](Vec& one, Vec& other) { return one + other; }, found) : 0.0f;
}

float* scan_memory(int64_t size) {
  thread_local std::vector<float> memory;
  memory.resize(std::max<size_t>(memory.size(), size));
  return memory.data();
}

// One head of a row. EACH: each place of a state has its own decay.
template <bool EACH>
void scan_head(const SelectiveScan& problem, const RowPlaces& at, int64_t row, int64_t head) {
  const int64_t depth = problem.depth, heads = problem.heads, size = problem.size, before = at.first - at.absorbed;
  const int64_t group = head / (heads / problem.groups);
  const float* a = problem.a + head * problem.decays;
  // A line with zeros up to a whole vector, and the decay of each place.
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  float *line = scan_memory(padded + before + problem.width), *decays = line + padded;
  const auto kept_at = [&](int64_t position) {
    const float* kept = problem.kept + (at.slot * problem.kept_places + position % problem.kept_places) * problem.inputs();
    const float *steps = kept + heads * depth, *all_b = steps + heads;
    return ScanInputs{
        kept + head * depth, steps[head], all_b + group * size, decays[position - at.absorbed]};
  };
  const auto step_at = [&](int64_t place) {
    const int64_t token = row * problem.width + place, of_head = token * heads + head;
    return ScanInputs{
        problem.x + of_head * depth, problem.dt[of_head], problem.b + (token * problem.groups + group) * size,
        decays[before + place]};
  };
  if (!EACH) {
    for (int64_t i = 0; i < before; ++i) {
      decays[i] = std::exp(kept_at(at.absorbed + i).dt * a[0]);
    }
    for (int64_t i = 0; i < problem.width; ++i) {
      decays[before + i] = std::exp(step_at(i).dt * a[0]);
    }
  }
  for (int64_t p = 0; p < depth; ++p) {
    float* state = problem.state + ((at.slot * heads + head) * depth + p) * size;
    std::fill_n(line, padded, 0.0f);
    if (at.absorbed > 0) {
      std::copy_n(state, size, line);
    }
    scan_places(
        at, problem.width,
        [&](int64_t position) { advance_line<EACH, false>(kept_at(position), p, a, nullptr, line, size); },
        [&](int64_t place) {
          const int64_t token = row * problem.width + place;
          const float* c = problem.c + (token * problem.groups + group) * size;
          problem.out[(token * heads + head) * depth + p] = advance_line<EACH, true>(step_at(place), p, a, c, line, size);
        },
        [&] { std::copy_n(line, size, state); });
  }
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

void apply_delta_rule(const DeltaRule& problem, const RowPlaces& at, int64_t row, int64_t head, int64_t begin) {
  const int64_t depth = problem.depth, wide = problem.value_depth, heads = problem.heads;
  const int64_t group = head / (heads / problem.groups), gates = problem.gates;
  float* memory = scan_memory(depth * (kColumns + 2));
  const DeltaColumns columns{
      depth, gates, std::min(kColumns, wide - begin), memory, memory + depth * kColumns, memory + depth * (kColumns + 1)};
  float* state = problem.state + (at.slot * heads + head) * depth * wide + begin;
  if (at.absorbed > 0) {
    columns.load(state, wide);
  } else {
    std::fill_n(columns.now, depth * kColumns, 0.0f);
  }
  scan_places(
      at, problem.width,
      [&](int64_t position) {
        const float* kept =
            problem.kept + (at.slot * problem.kept_places + position % problem.kept_places) * problem.inputs();
        const float *values = kept + problem.groups * depth, *all_gates = values + heads * wide;
        const float* betas = all_gates + heads * gates;
        columns.advance<false>(
            {kept + group * depth, values + head * wide + begin, all_gates + head * gates, betas[head]}, nullptr, nullptr);
      },
      [&](int64_t place) {
        const int64_t token = row * problem.width + place, of_head = token * heads + head;
        const int64_t of_group = (token * problem.groups + group) * depth;
        columns.advance<true>(
            {problem.k + of_group, problem.v + of_head * wide + begin, problem.gate + of_head * gates,
             problem.beta[of_head]},
            problem.q + of_group, problem.out + of_head * wide + begin);
      },
      [&] { columns.store(state, wide); });
}

void apply_selective_scan(const SelectiveScan& problem, const RowPlaces& at, int64_t row, int64_t head) {
  if (problem.decays > 1) {
    scan_head<true>(problem, at, row, head);
  } else {
    scan_head<false>(problem, at, row, head);
  }
}

}  // namespace speccompile
