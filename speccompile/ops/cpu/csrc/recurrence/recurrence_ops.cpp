// The recurrences as torch sees them; speccompile/ops/causal_conv.py, gated_delta_rule.py and selective_scan.py define
// them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "recurrence.h"
#include "../base/ops/share.h"
#include "../base/ops/tensors.h"

namespace speccompile {
namespace {

// Channels of a convolution, and numbers of a state, that are work enough for a thread.
constexpr int64_t kChannels = 256, kNumbers = 4096;

float* numbers_of(const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(), "speccompile::recurrence: ", what,
      " is not float32, side by side");
  return static_cast<float*>(tensor.data_ptr());
}

int64_t shared(const Tensor& tensor, int64_t size, const char* what) {
  STD_TORCH_CHECK(tensor.size(-1) == size, "speccompile::recurrence: the sizes of ", what, " do not fit");
  return size;
}

std::vector<RowPlaces> places_of(
    const Tensor& slots, const Tensor& positions, const Tensor* absorbed, const Tensor& settled, int64_t kept) {
  const Tensor own_slots = side_by_side(slots), own_settled = side_by_side(settled);
  const Tensor own_absorbed = absorbed ? side_by_side(*absorbed) : own_settled;
  const int64_t rows = positions.size(0), width = positions.size(1);
  STD_TORCH_CHECK(
      slots.numel() == rows && settled.numel() == rows && (!absorbed || absorbed->numel() == rows),
      "speccompile::recurrence: slots, positions, absorbed and settled have different rows");
  const auto* first_of = static_cast<const int64_t*>(positions.data_ptr());
  std::vector<RowPlaces> found(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = first_of[row * positions.stride(0)];
    const int64_t stands = absorbed ? static_cast<const int64_t*>(own_absorbed.data_ptr())[row] : first;
    const int64_t end = static_cast<const int64_t*>(own_settled.data_ptr())[row];
    STD_TORCH_CHECK(
        std::max<int64_t>(0, first - kept) <= stands && stands <= first && first <= end && end <= first + width,
        "speccompile::recurrence: row ", row, " at position ", first, ": its state has absorbed ", stands,
        " tokens and is to absorb ", end, ", with ", kept, " positions kept and ", width, " read");
    found[row] = {static_cast<const int64_t*>(own_slots.data_ptr())[row], first, stands, end};
  }
  return found;
}

// What a place has of one input, among all inputs of the place.
struct InputPart {
  const float* from;
  int64_t count, offset;
};

// Keeps the inputs of the positions from `begin` before what is settled on, as far as the step has them and there is room.
void keep_inputs(
    const std::vector<RowPlaces>& rows, int64_t width, const std::vector<InputPart>& parts, float* kept, int64_t places,
    int64_t inputs, int64_t before) {
  for (size_t row = 0; row < rows.size(); ++row) {
    const RowPlaces& at = rows[row];
    const int64_t begin = at.settled - before;
    for (int64_t p = std::max(begin, at.first); p < std::min(begin + places, at.first + width); ++p) {
      float* to = kept + (at.slot * places + p % places) * inputs;
      const int64_t token = static_cast<int64_t>(row) * width + p - at.first;
      for (const InputPart& part : parts) {
        std::memcpy(to + part.offset, part.from + token * part.count, part.count * sizeof(float));
      }
    }
  }
}

Tensor native_causal_conv(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor kept, const Tensor& slots,
    const Tensor& positions, const Tensor& settled) {
  const Tensor own_x = side_by_side(x), own_weight = side_by_side(weight),
               own_bias = bias ? side_by_side(*bias) : own_weight;
  CausalConv problem{};
  problem.width = x.size(1);
  problem.channels = shared(kept, x.size(2), "a convolution");
  problem.window = weight.size(1);
  problem.kept_places = kept.size(1);
  problem.x = numbers_of(own_x, "x");
  problem.weight = numbers_of(own_weight, "weight");
  problem.bias = bias ? numbers_of(own_bias, "bias") : nullptr;
  float* all_kept = numbers_of(kept, "what is kept");
  problem.kept = all_kept;
  const std::vector<RowPlaces> rows = places_of(slots, positions, nullptr, settled, kept.size(1));
  Tensor out = new_floats({x.size(0), x.size(1), x.size(2)});
  problem.out = numbers_of(out, "the result");
  const int64_t blocks = (problem.channels + kChannels - 1) / kChannels;
  parallel_for(0, static_cast<int64_t>(rows.size()) * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / blocks, begin = i % blocks * kChannels;
      convolve(problem, rows[row], row, begin, std::min(begin + kChannels, problem.channels));
    }
  });
  keep_inputs(
      rows, problem.width, {{problem.x, problem.channels, 0}}, all_kept, problem.kept_places, problem.channels,
      problem.window - 1);
  return out;
}

Tensor native_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate, const Tensor& beta, Tensor state, Tensor kept,
    const Tensor& slots, const Tensor& positions, const Tensor& absorbed, const Tensor& settled) {
  const Tensor own_q = side_by_side(q), own_k = side_by_side(k), own_v = side_by_side(v), own_gate = side_by_side(gate),
               own_beta = side_by_side(beta);
  DeltaRule problem{};
  problem.width = v.size(1);
  problem.heads = v.size(2);
  problem.groups = k.size(2);
  problem.depth = k.size(3);
  problem.value_depth = shared(state, v.size(3), "a state");
  problem.gates = gate.size(3);
  problem.kept_places = kept.size(1);
  problem.q = numbers_of(own_q, "q");
  problem.k = numbers_of(own_k, "k");
  problem.v = numbers_of(own_v, "v");
  problem.gate = numbers_of(own_gate, "gate");
  problem.beta = numbers_of(own_beta, "beta");
  problem.state = numbers_of(state, "the state");
  float* all_kept = numbers_of(kept, "what is kept");
  problem.kept = all_kept;
  shared(kept, problem.inputs(), "what is kept");
  const std::vector<RowPlaces> rows = places_of(slots, positions, &absorbed, settled, kept.size(1));
  Tensor out = new_floats({v.size(0), v.size(1), v.size(2), v.size(3)});
  problem.out = numbers_of(out, "the result");
  const int64_t heads = problem.heads, blocks = (problem.value_depth + kDeltaColumns - 1) / kDeltaColumns;
  const int64_t grain = std::max<int64_t>(1, kNumbers / (problem.depth * kDeltaColumns));
  parallel_for(0, static_cast<int64_t>(rows.size()) * heads * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / (heads * blocks);
      apply_delta_rule(problem, rows[row], row, i / blocks % heads, i % blocks * kDeltaColumns);
    }
  });
  const int64_t keys = problem.groups * problem.depth, values = heads * problem.value_depth, gates = heads * problem.gates;
  const std::vector<InputPart> parts{
      {problem.k, keys, 0},
      {problem.v, values, keys},
      {problem.gate, gates, keys + values},
      {problem.beta, heads, keys + values + gates}};
  keep_inputs(rows, problem.width, parts, all_kept, problem.kept_places, problem.inputs(), 0);
  return out;
}

Tensor native_selective_scan(
    const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, Tensor state, Tensor kept,
    const Tensor& slots, const Tensor& positions, const Tensor& absorbed, const Tensor& settled) {
  const Tensor own_x = side_by_side(x), own_dt = side_by_side(dt), own_a = side_by_side(a), own_b = side_by_side(b),
               own_c = side_by_side(c);
  SelectiveScan problem{};
  problem.width = x.size(1);
  problem.heads = x.size(2);
  problem.groups = b.size(2);
  problem.depth = x.size(3);
  problem.size = shared(state, b.size(3), "a state");
  problem.decays = a.size(1);
  problem.kept_places = kept.size(1);
  problem.x = numbers_of(own_x, "x");
  problem.dt = numbers_of(own_dt, "dt");
  problem.a = numbers_of(own_a, "A");
  problem.b = numbers_of(own_b, "B");
  problem.c = numbers_of(own_c, "C");
  problem.state = numbers_of(state, "the state");
  float* all_kept = numbers_of(kept, "what is kept");
  problem.kept = all_kept;
  shared(kept, problem.inputs(), "what is kept");
  const std::vector<RowPlaces> rows = places_of(slots, positions, &absorbed, settled, kept.size(1));
  Tensor out = new_floats({x.size(0), x.size(1), x.size(2), x.size(3)});
  problem.out = numbers_of(out, "the result");
  const int64_t heads = problem.heads, grain = std::max<int64_t>(1, kNumbers / (problem.depth * problem.size));
  parallel_for(0, static_cast<int64_t>(rows.size()) * heads, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      apply_selective_scan(problem, rows[i / heads], i / heads, i % heads);
    }
  });
  const int64_t inner = heads * problem.depth;
  const std::vector<InputPart> parts{
      {problem.x, inner, 0}, {problem.dt, heads, inner}, {problem.b, problem.groups * problem.size, inner + heads}};
  keep_inputs(rows, problem.width, parts, all_kept, problem.kept_places, problem.inputs(), 0);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_causal_conv_", TORCH_BOX(&native_causal_conv));
  m.impl("native_gated_delta_rule_", TORCH_BOX(&native_gated_delta_rule));
  m.impl("native_selective_scan_", TORCH_BOX(&native_selective_scan));
}

}  // namespace
}  // namespace speccompile
