// The choice of tokens, as torch sees it: the best, the likeliest, and those that stay.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../kernels/choose.h"
#include "../kernels/likeliest.h"
#include "choose_tokens.h"
#include "kernel_calls.h"
#include "tensors.h"

namespace speccompile {

ChooseAgain choose_again = nullptr;

SPECCOMPILE_EXPORT void speccompile_set_choose_again(ChooseAgain function) {
  choose_again = function;
}

namespace {

Tensor choose_op(
    const Tensor& scores, const std::optional<Tensor>& temperature, const std::optional<Tensor>& seed,
    const std::optional<Tensor>& positions, int64_t stream, const std::optional<Tensor>& start, bool forbids,
    int64_t first_id) {
  const int64_t rows = scores.size(0), width = scores.size(1), vocab = scores.size(2);
  STD_TORCH_CHECK(vocab >= 1 && vocab <= kMostTokens, "speccompile::choose: a vocabulary of ", vocab, " tokens");
  STD_TORCH_CHECK(
      temperature.has_value() == seed.has_value() && seed.has_value() == positions.has_value(),
      "speccompile::choose: temperature, seed and positions come together");
  const Tensor given = scores.stride(2) == 1 ? scores : side_by_side(scores);
  const Type type = type_of(given);
  const int64_t bytes = type == Type::Float ? 4 : 2;
  bool in_place = scores.stride(2) == 1;
  const auto plain = [&](const std::optional<Tensor>& tensor) {
    in_place = in_place && (!tensor || tensor->is_contiguous());
    return tensor ? std::optional<Tensor>(side_by_side(*tensor)) : std::nullopt;
  };
  const std::optional<Tensor> temperatures = plain(temperature), seeds = plain(seed), places_of = plain(positions),
                              starts = plain(start);
  Noise noise;
  if (temperatures) {
    noise.temperature = static_cast<const float*>(temperatures->data_ptr());
    noise.seed = static_cast<const int64_t*>(seeds->data_ptr());
    noise.positions = static_cast<const int64_t*>(places_of->data_ptr());
    noise.start = starts ? static_cast<const int64_t*>(starts->data_ptr()) : nullptr;
    noise.stream = stream;
  }
  const Places places{static_cast<const char*>(given.data_ptr()), type, rows, width, vocab, given.stride(0) * bytes,
                      given.stride(1) * bytes};
  const Tensor tokens = new_integers({rows, width});
  auto* const token = static_cast<int64_t*>(tokens.data_ptr());
  run_kernel([=] { choose_tokens(places, noise, forbids, first_id, token); }, in_place);
  return tokens;
}

std::tuple<Tensor, Tensor> likeliest_op(
    const Tensor& scores, int64_t count, const std::optional<Tensor>& temperature, const std::optional<Tensor>& seed,
    const std::optional<Tensor>& positions) {
  const int64_t rows = scores.size(0), width = scores.size(1), vocab = scores.size(2);
  STD_TORCH_CHECK(count >= 1 && count <= vocab, "speccompile::likeliest: ", count, " of ", vocab, " tokens");
  STD_TORCH_CHECK(
      temperature.has_value() == seed.has_value() && seed.has_value() == positions.has_value(),
      "speccompile::likeliest: temperature, seed and positions come together");
  const Tensor given = side_by_side(scores), temperatures = side_by_side(temperature.value_or(given)),
               seeds = side_by_side(seed.value_or(given)), places = side_by_side(positions.value_or(given));
  const Type type = type_of(given);
  const int64_t score_size = type == Type::Float ? 4 : 2;
  const auto* heat = temperature ? static_cast<const float*>(temperatures.data_ptr()) : nullptr;
  const auto* seed_of = static_cast<const int64_t*>(seeds.data_ptr());
  const auto* position_of = static_cast<const int64_t*>(places.data_ptr());
  const auto* from = static_cast<const char*>(given.data_ptr());
  Tensor tokens = new_integers({rows, width, count}), logprobs = new_floats({rows, width, count});
  auto* token = static_cast<int64_t*>(tokens.data_ptr());
  auto* logprob = static_cast<float*>(logprobs.data_ptr());
  const auto plain = [](const std::optional<Tensor>& tensor) {
    return !tensor || tensor->is_contiguous();
  };
  run_kernel(
      [=] {
        parallel_for(0, rows * width, 1, [=](int64_t first, int64_t last) {
          for (int64_t at = first; at < last; ++at) {
            std::optional<uint64_t> key;
            if (heat && heat[at / width] > 0) {
              key = key_of(seed_of[at / width], kTokenStream, position_of[at], std::nullopt);
            }
            likeliest(type, from + at * vocab * score_size, vocab, count, key, token + at * count, logprob + at * count);
          }
        });
      },
      scores.is_contiguous() && plain(temperature) && plain(seed) && plain(positions));
  return {tokens, logprobs};
}

Tensor greatest_op(const Tensor& scores, int64_t count) {
  const int64_t vocab = scores.size(2);
  STD_TORCH_CHECK(count >= 1 && count <= vocab, "speccompile::greatest: ", count, " of ", vocab, " scores");
  STD_TORCH_CHECK(type_of(scores) == Type::Float, "speccompile::greatest takes float32");
  const Tensor given = side_by_side(scores);
  Tensor out = torch::stable::new_empty(scores, {scores.size(0), scores.size(1), count});
  const auto* from = static_cast<const float*>(given.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  parallel_for(0, scores.size(0) * scores.size(1), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      greatest_of(from + i * vocab, vocab, count, to + i * count);
    }
  });
  return out;
}

Tensor greatest_share_op(const Tensor& scores) {
  const int64_t vocab = scores.size(2);
  STD_TORCH_CHECK(type_of(scores) == Type::Float, "speccompile::greatest_share takes float32");
  const Tensor given = side_by_side(scores);
  Tensor out = torch::stable::new_empty(scores, {scores.size(0), scores.size(1), 1});
  const auto* from = static_cast<const float*>(given.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  parallel_for(0, scores.size(0) * scores.size(1), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      to[i] = greatest_share(from + i * vocab, vocab);
    }
  });
  return out;
}

void mask_below_op(Tensor scores, const Tensor& threshold) {
  STD_TORCH_CHECK(
      scores.is_contiguous() && type_of(scores) == Type::Float && type_of(threshold) == Type::Float,
      "speccompile::mask_below_ takes float32, side by side");
  const int64_t places = scores.size(0) * scores.size(1), vocab = scores.size(2);
  STD_TORCH_CHECK(threshold.numel() == places, "speccompile::mask_below_: the sizes do not fit");
  const Tensor bars = side_by_side(threshold);
  const auto* bar = static_cast<const float*>(bars.data_ptr());
  auto* to = static_cast<float*>(scores.data_ptr());
  const int64_t pieces = (vocab + kPiece - 1) / kPiece;
  parallel_for(0, places * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i / pieces, begin = i % pieces * kPiece;
      cut_below(to + at * vocab + begin, std::min(kPiece, vocab - begin), bar[at]);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("choose", TORCH_BOX(&choose_op));
  m.impl("likeliest", TORCH_BOX(&likeliest_op));
  m.impl("greatest", TORCH_BOX(&greatest_op));
  m.impl("greatest_share", TORCH_BOX(&greatest_share_op));
  m.impl("mask_below_", TORCH_BOX(&mask_below_op));
}

}  // namespace
}  // namespace speccompile
