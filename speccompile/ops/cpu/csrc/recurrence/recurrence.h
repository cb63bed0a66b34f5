// Recurrences of a step's rows over the state of their own slots, place by place, see recurrence.cpp and
// speccompile/ops/recurrence.py. All numbers are float32, side by side.
#pragma once

#include <cstdint>

namespace speccompile {

// One row: its slot, the position of its first token, and where its state stands before and after the step.
struct RowPlaces {
  int64_t slot, first, absorbed, settled;
};

struct CausalConv {
  int64_t width, channels, window, kept_places;
  const float *x, *weight, *bias;  // [B, T, C], [C, W], [C] or null
  const float* kept;               // [N, R, C]
  float* out;                      // [B, T, C]
};

// Channels [begin, end) of a row.
void convolve(const CausalConv& problem, const RowPlaces& at, int64_t row, int64_t begin, int64_t end);

struct DeltaRule {
  int64_t width, heads, groups, depth, value_depth, gates, kept_places;
  const float *q, *k, *v, *gate, *beta;  // [B, T, G, D] twice, [B, T, H, Dv], [B, T, H, 1 or D], [B, T, H]
  float* state;                          // [N, H, D, Dv]
  const float* kept;                     // [N, R, F]
  float* out;                            // [B, T, H, Dv]

  int64_t inputs() const {
    return groups * depth + heads * (value_depth + gates + 1);
  }
};

// Columns of a head's state that are computed at once.
constexpr int64_t kDeltaColumns = 32;

// One head of a row: the columns [begin, begin + kDeltaColumns) of its values, as far as there are.
void apply_delta_rule(const DeltaRule& problem, const RowPlaces& at, int64_t row, int64_t head, int64_t begin);

struct SelectiveScan {
  int64_t width, heads, groups, depth, size, decays, kept_places;
  const float *x, *dt, *a, *b, *c;  // [B, T, H, P], [B, T, H], [H, 1 or M], [B, T, G, M] twice
  float* state;                     // [N, H, P, M]
  const float* kept;                // [N, R, F]
  float* out;                       // [B, T, H, P]

  int64_t inputs() const {
    return heads * (depth + 1) + groups * size;
  }
};

// One head of a row.
void apply_selective_scan(const SelectiveScan& problem, const RowPlaces& at, int64_t row, int64_t head);

}  // namespace speccompile
