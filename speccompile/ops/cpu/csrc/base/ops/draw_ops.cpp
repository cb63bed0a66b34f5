// Tokens drawn after temperature, top-k, top-p and min-p, as torch sees it; speccompile/sampling/filters.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>

#include "../kernels/filters.h"
#include "choose_tokens.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

using MaybeTensor = std::optional<Tensor>;

// The state of the filters [N].
struct Options {
  const float* temperature;  // None: the scores are divided already.
  const int64_t* top_k;
  const float *top_p, *min_p;

  Filters of(int64_t slot) const {
    Filters filters;
    filters.top_k = top_k ? top_k[slot] : filters.top_k;
    filters.top_p = top_p ? top_p[slot] : filters.top_p;
    filters.min_p = min_p ? min_p[slot] : filters.min_p;
    return filters;
  }
};

Options options_of(
    const Tensor& temperature, const MaybeTensor& top_k, const MaybeTensor& top_p, const MaybeTensor& min_p, bool divided) {
  return {
      divided ? nullptr : floats(temperature), top_k ? integers(*top_k) : nullptr, top_p ? floats(*top_p) : nullptr,
      min_p ? floats(*min_p) : nullptr};
}

Places places_of(const Tensor& logits) {
  const Type type = type_of(logits);
  const int64_t bytes = type == Type::Float ? 4 : 2;
  return {
      static_cast<const char*>(logits.data_ptr()),
      type,
      logits.size(0),
      logits.size(1),
      logits.size(2),
      logits.stride(0) * bytes,
      logits.stride(1) * bytes};
}

// Scores float32 [rows, width, vocab] after the filters.
void filter_places(const Places& places, const int64_t* slots, const Options& options, float* to) {
  const int64_t vocab = places.vocab, count = places.rows * places.width, pieces = (vocab + kPiece - 1) / kPiece;
  parallel_for(0, count * pieces, 1, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i / pieces, begin = i % pieces * kPiece;
      const float heat = options.temperature ? options.temperature[slots[at / places.width]] : 1.0f;
      divide(places.type, places.place(at), begin, std::min(begin + kPiece, vocab), heat, to + at * vocab);
    }
  });
  bool any = false;
  for (int64_t row = 0; row < places.rows; ++row) {
    any = any || options.of(slots[row]).any();
  }
  if (any) {
    parallel_for(0, count, 1, [=](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; ++at) {
        filter(to + at * vocab, vocab, options.of(slots[at / places.width]));
      }
    });
  }
}

Tensor filter_logits_op(
    const Tensor& logits, const Tensor& slots, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
    const Tensor& min_p) {
  const Tensor given = logits.stride(2) == 1 ? logits : side_by_side(logits), own_slots = side_by_side(slots);
  const Options options = options_of(temperature, top_k, top_p, min_p, false);
  const Places places = places_of(given);
  const Tensor scores = new_floats({places.rows, places.width, places.vocab});
  const int64_t* const slot = integers(own_slots);
  auto* const to = static_cast<float*>(scores.data_ptr());
  run_kernel(
      [=] { filter_places(places, slot, options, to); }, logits.stride(2) == 1 && slots.is_contiguous());
  return scores;
}

Tensor draw_filtered_op(
    const Tensor& logits, const Tensor& slots, const Tensor& temperature, const MaybeTensor& top_k,
    const MaybeTensor& top_p, const MaybeTensor& min_p, const Tensor& length, const Tensor& seed,
    const MaybeTensor& depths, bool divided) {
  const Tensor given = logits.stride(2) == 1 ? logits : side_by_side(logits), own_slots = side_by_side(slots);
  const MaybeTensor own_depths = depths ? MaybeTensor(side_by_side(*depths)) : std::nullopt;
  const Options options = options_of(temperature, top_k, top_p, min_p, divided);
  const Places places = places_of(given);
  STD_TORCH_CHECK(
      places.vocab >= 1 && places.vocab <= kMostTokens, "speccompile::draw_filtered: a vocabulary of ", places.vocab,
      " tokens");
  Noise noise;
  noise.temperature = floats(temperature);
  noise.seed = integers(seed);
  noise.slots = integers(own_slots);
  noise.length = integers(length);
  noise.depths = own_depths ? integers(*own_depths) : nullptr;
  noise.stream = kTokenStream;
  const Tensor tokens = new_integers({places.rows, places.width});
  auto* const token = static_cast<int64_t*>(tokens.data_ptr());
  // Scores that no option changes are read where they are. Others are filtered in memory of the step.
  const bool in_place = divided && !options.top_k && !options.top_p && !options.min_p;
  const Tensor own = new_floats({in_place ? 0 : places.rows, places.width, places.vocab});
  auto* const scores = static_cast<float*>(own.data_ptr());
  run_kernel(
      [=] {
        if (in_place) {
          return choose_tokens(places, noise, true, 0, token);
        }
        filter_places(places, noise.slots, options, scores);
        const int64_t bytes = places.vocab * 4;
        const Places filtered{
            reinterpret_cast<const char*>(scores), Type::Float, places.rows, places.width, places.vocab,
            places.width * bytes, bytes};
        choose_tokens(filtered, noise, true, 0, token);
      },
      logits.stride(2) == 1 && slots.is_contiguous() && (!depths || depths->is_contiguous()));
  return tokens;
}

// The threshold of each place of float32 scores, by the option of its row.
template <typename Threshold>
Tensor thresholds(const Tensor& scores, const Tensor& option, Threshold threshold) {
  const Tensor given = side_by_side(scores), own = side_by_side(option);
  STD_TORCH_CHECK(
      type_of(given) == Type::Float && type_of(own) == Type::Float && own.numel() == scores.size(0),
      "speccompile: a threshold is that of float32 scores, by a float32 option of each row");
  const int64_t width = scores.size(1), vocab = scores.size(2);
  const Tensor out = new_floats({scores.size(0), width, 1});
  const auto* from = static_cast<const float*>(given.data_ptr());
  const auto* of = static_cast<const float*>(own.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  parallel_for(0, scores.size(0) * width, 1, [=](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      to[at] = threshold(from + at * vocab, vocab, of[at / width]);
    }
  });
  return out;
}

Tensor top_p_threshold_op(const Tensor& scores, const Tensor& top_p) {
  return thresholds(scores, top_p, top_p_threshold);
}

Tensor min_p_threshold_op(const Tensor& scores, const Tensor& min_p) {
  return thresholds(scores, min_p, min_p_threshold);
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("filter_logits", TORCH_BOX(&filter_logits_op));
  m.impl("draw_filtered", TORCH_BOX(&draw_filtered_op));
  m.impl("top_p_threshold", TORCH_BOX(&top_p_threshold_op));
  m.impl("min_p_threshold", TORCH_BOX(&min_p_threshold_op));
}

}  // namespace
}  // namespace speccompile
