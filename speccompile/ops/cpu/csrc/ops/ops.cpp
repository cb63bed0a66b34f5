// The ops as torch sees them. Through torch's stable interface, whose headers compile in seconds.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "../kernels/attention.h"
#include "../kernels/choose.h"
#include "../kernels/likeliest.h"
#include "../kernels/linear.h"
#include "../kernels/rounded.h"
#include "ops.h"
#include "share.h"

namespace speccompile {
namespace {

constexpr int64_t kColumns = 32;

// Blocks of several weights, as one list that threads share out.
template <typename Run>
void over_all_blocks(const std::vector<Tensor>& packed, Run run) {
  int64_t all = 0;
  for (const Tensor& weight : packed) {
    all += weight.size(0);
  }
  parallel_for(0, all, 1, [&](int64_t first, int64_t last) {
    int64_t begun = 0;
    for (size_t i = 0; i < packed.size() && begun < last; begun += packed[i++].size(0)) {
      const int64_t from = std::max(first - begun, int64_t{0}), to = std::min(last - begun, packed[i].size(0));
      if (from < to) {
        run(i, from, to);
      }
    }
  });
}

std::vector<Tensor> new_outputs(const Tensor& x, const std::vector<int64_t>& features) {
  std::vector<Tensor> made;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (const int64_t count : features) {
    sizes.back() = count;
    made.push_back(new_floats(sizes));
  }
  return made;
}

std::vector<Tensor> as_dtype(std::vector<Tensor> outputs, ScalarType dtype) {
  if (dtype != ScalarType::Float) {
    for (Tensor& out : outputs) {
      out = torch::stable::to(out, dtype);
    }
  }
  return outputs;
}

}  // namespace

std::vector<Tensor> packed_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& biases,
    const std::vector<int64_t>& features) {
  const int64_t depth = x.size(-1), rows = x.numel() / depth;
  for (const Tensor& weight : packed) {
    STD_TORCH_CHECK(
        weight.size(1) == depth && weight.size(2) == kColumns, "speccompile::packed_linear: the sizes do not fit");
  }
  std::vector<Tensor> added;
  for (size_t i = 0; i < biases.size(); ++i) {
    STD_TORCH_CHECK(
        biases[i].scalar_type() == packed[i].scalar_type(),
        "speccompile::packed_linear: weight and bias have different dtypes");
    added.push_back(side_by_side(biases[i]));
  }
  const Tensor input = side_by_side(as_float(x));
  const std::vector<Tensor> outputs = new_outputs(x, features);
  const auto* from = static_cast<const float*>(input.data_ptr());
  over_all_blocks(packed, [&](size_t i, int64_t first, int64_t last) {
    linear_blocks(
        type_of(packed[i]), from, rows, depth, packed[i].data_ptr(), added.empty() ? nullptr : added[i].data_ptr(),
        static_cast<float*>(outputs[i].data_ptr()), features[i], first, last);
  });
  return as_dtype(outputs, x.scalar_type());
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features) {
  return packed_linears(x, {packed}, bias ? std::vector<Tensor>{*bias} : std::vector<Tensor>{}, {features})[0];
}

namespace {

int64_t groups_of(int64_t depth) {
  return (depth + kGroup - 1) / kGroup;
}

// What a rounded weight [features, depth] takes.
Scales scales_of(const RoundedWeight& form, const Tensor& packed, const Tensor& scales, int64_t groups) {
  const bool minimums = scales.dim() == 4, in_steps = scales.scalar_type() == ScalarType::Byte;
  // Of a float16 for each column, and numbers of rows that share it.
  const int64_t line = scales.size(-1), steps = in_steps ? line / kColumns - 2 : 1, rows = scales.size(1) * steps;
  STD_TORCH_CHECK(
      form.kernel.fits(groups, rows) && packed.size(1) * 4 == groups * kGroup &&
          packed.size(0) == scales.size(0) && packed.size(2) == form.numbers && (!minimums || scales.size(2) == 2) &&
          line == (in_steps ? (steps + 2) * kColumns : kColumns) && scales.is_contiguous(),
      "speccompile::", form.name, "_linear: the sizes do not fit");
  const ScalarType type = scales.scalar_type();
  STD_TORCH_CHECK(
      in_steps || type == ScalarType::Half || type == ScalarType::Float, "speccompile::", form.name,
      "_linear: scales are of float32, float16 or bytes");
  const ScaleKind kind = in_steps ? ScaleKind::Steps : type == ScalarType::Half ? ScaleKind::Half : ScaleKind::Single;
  return {scales.data_ptr(), rows, kind, steps, minimums};
}

std::vector<Tensor> linears_of(
    const RoundedWeight& form, const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  const int64_t depth = x.size(-1), rows = x.numel() / depth, groups = groups_of(depth);
  std::vector<Tensor> added;
  std::vector<Scales> all_scales;
  for (size_t i = 0; i < packed.size(); ++i) {
    all_scales.push_back(scales_of(form, packed[i], scales[i], groups));
    if (!biases.empty()) {
      added.push_back(side_by_side(as_float(biases[i])));
    }
  }
  const Tensor input = side_by_side(as_float(x));
  const std::vector<Tensor> outputs = new_outputs(x, features);
  const int64_t row_bytes = form.kernel.input_bytes(groups);
  thread_local std::vector<uint8_t> inputs;
  thread_local std::vector<float> input_scales;
  inputs.resize(std::max<size_t>(inputs.size(), rows * row_bytes));
  input_scales.resize(std::max<size_t>(input_scales.size(), rows * groups));
  const auto* from = static_cast<const float*>(input.data_ptr());
  auto* q = inputs.data();
  auto* q_scales = input_scales.data();
  parallel_for(0, rows, 32, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      form.kernel.round_inputs(from + row * depth, depth, groups, q + row * row_bytes, q_scales + row * groups);
    }
  });
  over_all_blocks(packed, [&](size_t i, int64_t first, int64_t last) {
    form.kernel.blocks(
        q, q_scales, rows, groups, packed[i].data_ptr(), all_scales[i],
        added.empty() ? nullptr : static_cast<const float*>(added[i].data_ptr()),
        static_cast<float*>(outputs[i].data_ptr()), features[i], first, last);
  });
  return as_dtype(outputs, x.scalar_type());
}

}  // namespace

const RoundedWeight int8_weight{"int8", kInt8, 32}, int4_weight{"int4", kInt4, 16};

template <const RoundedWeight& form>
std::vector<Tensor> rounded_linears(
    const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features) {
  return linears_of(form, x, packed, scales, biases, features);
}

template <const RoundedWeight& form>
Tensor rounded_linear(
    const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias, int64_t features) {
  return linears_of(
      form, x, {packed}, {scales}, bias ? std::vector<Tensor>{*bias} : std::vector<Tensor>{}, {features})[0];
}

template Tensor rounded_linear<int8_weight>(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);
template Tensor rounded_linear<int4_weight>(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);
template std::vector<Tensor> rounded_linears<int8_weight>(
    const Tensor&, const std::vector<Tensor>&, const std::vector<Tensor>&, const std::vector<Tensor>&,
    const std::vector<int64_t>&);
template std::vector<Tensor> rounded_linears<int4_weight>(
    const Tensor&, const std::vector<Tensor>&, const std::vector<Tensor>&, const std::vector<Tensor>&,
    const std::vector<int64_t>&);

namespace {

// As torch's own embedding, which does not read beside its weight either.
void check_ids(const Tensor& ids, int64_t blocks) {
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    STD_TORCH_CHECK(id[i] >= 0 && id[i] < blocks * kColumns, "embedding: index out of range: ", id[i]);
  }
}

template <const RoundedWeight& form>
Tensor rounded_embedding(const Tensor& packed, const Tensor& scales, const Tensor& ids, int64_t depth) {
  const Scales units = scales_of(form, packed, scales, groups_of(depth));
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(depth);
  const Tensor places = side_by_side(ids);
  check_ids(places, packed.size(0));
  const Tensor out = new_floats(sizes);
  const auto* id = static_cast<const int64_t*>(places.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < places.numel(); ++i) {
    form.kernel.weight_row(id[i], depth, groups_of(depth), packed.data_ptr(), units, to + i * depth);
  }
  return out;
}

Tensor packed_embedding(const Tensor& packed, const Tensor& ids) {
  const int64_t depth = packed.size(1);
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(depth);
  const Tensor places = side_by_side(ids);
  check_ids(places, packed.size(0));
  Tensor out = torch::stable::new_empty(packed, sizes);
  const auto* id = static_cast<const int64_t*>(places.data_ptr());
  const auto gather = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < places.numel(); ++i) {
      const auto* column = from + id[i] / kColumns * depth * kColumns + id[i] % kColumns;
      for (int64_t k = 0; k < depth; ++k) {
        *to++ = column[k * kColumns];
      }
    }
  };
  if (type_of(packed) == Type::Float) {
    gather(static_cast<float*>(out.data_ptr()), static_cast<const float*>(packed.data_ptr()));
  } else {
    gather(static_cast<uint16_t*>(out.data_ptr()), static_cast<const uint16_t*>(packed.data_ptr()));
  }
  return out;
}

// A node comes after its parent, and one place further on: what is walked from a node on ends at a root.
void check_parents(const Tensor& parents, const Tensor& positions, int64_t rows, int64_t width) {
  STD_TORCH_CHECK(
      parents.dim() == 2 && parents.size(0) == rows && parents.size(1) == width,
      "speccompile::attention: parents have another shape than positions");
  const int64_t* of = static_cast<const int64_t*>(parents.data_ptr());
  const int64_t* at = static_cast<const int64_t*>(positions.data_ptr());
  for (int64_t i = 0; i < rows * width; ++i) {
    const int64_t node = i % width;
    STD_TORCH_CHECK(
        of[i] >= -1 && of[i] < node, "speccompile::attention: node ", node, " has the parent ", of[i]);
    const int64_t expected = of[i] == -1 ? at[i - node] : at[i - node + of[i]] + 1;
    STD_TORCH_CHECK(at[i] == expected, "speccompile::attention: node ", node, " is at position ", at[i]);
  }
}

}  // namespace

Tensor native_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& positions,
    double scale, const std::optional<int64_t>& window, const std::optional<int64_t>& chunk,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents) {
  STD_TORCH_CHECK(
      window.value_or(1) >= 1, "speccompile::attention needs a window of at least 1, not ", window.value_or(1));
  STD_TORCH_CHECK(chunk.value_or(1) >= 1, "speccompile::attention needs a chunk of at least 1, not ", chunk.value_or(1));
  const Tensor queries = q.stride(3) == 1 ? q : side_by_side(q);
  STD_TORCH_CHECK(
      q.scalar_type() == k_cache.scalar_type() && q.scalar_type() == v_cache.scalar_type(),
      "speccompile::attention: queries, keys and values have different dtypes");
  STD_TORCH_CHECK(k_cache.stride(3) == 1 && v_cache.stride(3) == 1, "speccompile::attention: a head's features lie apart");
  const Tensor own_slots = side_by_side(slots), own_positions = side_by_side(positions);
  // Any tensor stands in for those that are not there.
  const Tensor own_sinks = sinks ? side_by_side(as_float(*sinks)) : slots;
  const Tensor own_parents = parents ? side_by_side(*parents) : slots;
  if (parents) {
    check_parents(own_parents, own_positions, q.size(0), q.size(1));
  }
  Tensor out = new_floats({q.size(0), q.size(1), q.size(2), v_cache.size(3)});
  Attention problem{};
  problem.rows = q.size(0);
  problem.width = q.size(1);
  problem.heads = q.size(2);
  problem.groups = k_cache.size(2);
  problem.depth = q.size(3);
  problem.value_depth = v_cache.size(3);
  problem.type = type_of(q);
  problem.q = queries.data_ptr();
  problem.k = k_cache.data_ptr();
  problem.v = v_cache.data_ptr();
  problem.q_row = queries.stride(0);
  problem.q_place = queries.stride(1);
  problem.q_head = queries.stride(2);
  problem.k_slot = k_cache.stride(0);
  problem.k_place = k_cache.stride(1);
  problem.k_head = k_cache.stride(2);
  problem.v_slot = v_cache.stride(0);
  problem.v_place = v_cache.stride(1);
  problem.v_head = v_cache.stride(2);
  problem.slots = static_cast<const int64_t*>(own_slots.data_ptr());
  problem.positions = static_cast<const int64_t*>(own_positions.data_ptr());
  problem.scale = static_cast<float>(scale);
  problem.window = window.value_or(kNone);
  problem.chunk = chunk.value_or(kNone);
  problem.softcap = static_cast<float>(softcap.value_or(0.0));
  problem.sinks = sinks ? static_cast<const float*>(own_sinks.data_ptr()) : nullptr;
  problem.parents = parents ? static_cast<const int64_t*>(own_parents.data_ptr()) : nullptr;
  problem.out = static_cast<float*>(out.data_ptr());

  std::vector<Queries> pieces(most_pieces(problem));
  const Plan made = plan(problem, pieces.data());
  pieces.resize(made.count);
  std::vector<int64_t> costs(made.count);
  int64_t dearest = 0, all_costs = 0;
  for (int64_t i = 0; i < made.count; ++i) {
    costs[i] = block_cost(problem, pieces[i]) * (pieces[i].last_block - pieces[i].first_block);
    dearest = std::max(dearest, costs[i]);
    all_costs += costs[i];
  }
  if (dearest * 4 * static_cast<int64_t>(thread_count()) <= all_costs) {
    share_out(costs, [&](int64_t i) { attend(problem, pieces[i]); });
  } else {
    // Few queries, or many of one row: the keys are shared out.
    thread_local std::vector<float> parts;
    parts.resize(std::max<size_t>(parts.size(), made.parts * part_size(problem)));
    float* const all = parts.data();
    std::vector<const Queries*> piece_of;
    costs.clear();
    for (const Queries& piece : pieces) {
      piece_of.insert(piece_of.end(), piece.last_block - piece.first_block, &piece);
      costs.insert(costs.end(), piece.last_block - piece.first_block, block_cost(problem, piece));
    }
    share_out(costs, [&](int64_t i) {
      const Queries& piece = *piece_of[i];
      attend_block(problem, piece, piece.first_block + i - piece.first_part, all + i * part_size(problem));
    });
    parallel_for(0, made.count, 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        join_blocks(problem, pieces[i], all);
      }
    });
  }
  return out.scalar_type() == q.scalar_type() ? out : torch::stable::to(out, q.scalar_type());
}

namespace {

// Work for a thread: so many ids of one place.
constexpr int64_t kPiece = 16384;

std::tuple<Tensor, Tensor> choose_nearly(
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
  const int64_t score_size = type == Type::Float ? 4 : 2;
  const auto* from = static_cast<const char*>(given.data_ptr());
  const auto plain = [](const std::optional<Tensor>& tensor, const Tensor& other) {
    return side_by_side(tensor.value_or(other));
  };
  // Any tensor stands in for noise that there is none of.
  const Tensor temperatures = plain(temperature, given), seeds = plain(seed, given), places = plain(positions, given),
               starts = plain(start, given);
  const auto* heat = temperature ? static_cast<const float*>(temperatures.data_ptr()) : nullptr;
  const auto* seed_of = static_cast<const int64_t*>(seeds.data_ptr());
  const auto* position_of = static_cast<const int64_t*>(places.data_ptr());
  const auto* start_of = start ? static_cast<const int64_t*>(starts.data_ptr()) : nullptr;

  const int64_t pieces = (vocab + kPiece - 1) / kPiece;
  std::vector<Best> found(rows * width * pieces);
  parallel_for(0, rows * width * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i / pieces, piece = i % pieces, row = at / width;
      std::optional<uint64_t> key;
      if (heat && heat[row] > 0) {
        key = key_of(
            seed_of[row], stream, position_of[at], start_of ? std::optional<int64_t>(start_of[row]) : std::nullopt);
      }
      const char* place = from + (row * given.stride(0) + at % width * given.stride(1)) * score_size;
      found[i] = best_of(type, place, piece * kPiece, std::min((piece + 1) * kPiece, vocab), key, first_id);
    }
  });
  Tensor tokens = torch::stable::new_empty(scores, {rows, width}, ScalarType::Long);
  Tensor close = torch::stable::new_empty(scores, {rows, width}, ScalarType::Bool);
  auto* token = static_cast<int64_t*>(tokens.data_ptr());
  auto* unsure = static_cast<bool*>(close.data_ptr());
  for (int64_t at = 0; at < rows * width; ++at) {
    Best best = found[at * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      best = join(best, found[at * pieces + piece]);
    }
    const bool none = best.is_nan || (forbids && best.top == -std::numeric_limits<float>::infinity());
    token[at] = none ? -1 : best.token;
    unsure[at] = !none && heat && heat[at / width] > 0 && is_close(best);
  }
  return {tokens, close};
}

std::tuple<Tensor, Tensor> native_likeliest(
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
  parallel_for(0, rows * width, 1, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      std::optional<uint64_t> key;
      if (heat && heat[at / width] > 0) {
        key = key_of(seed_of[at / width], kTokenStream, position_of[at], std::nullopt);
      }
      likeliest(type, from + at * vocab * score_size, vocab, count, key, token + at * count, logprob + at * count);
    }
  });
  return {tokens, logprobs};
}

Tensor native_greatest(const Tensor& scores, int64_t count) {
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

Tensor native_greatest_share(const Tensor& scores) {
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

void native_cut_below(Tensor scores, const Tensor& threshold) {
  STD_TORCH_CHECK(
      scores.is_contiguous() && type_of(scores) == Type::Float && type_of(threshold) == Type::Float,
      "speccompile::cut_below_ takes float32, side by side");
  const int64_t places = scores.size(0) * scores.size(1), vocab = scores.size(2);
  STD_TORCH_CHECK(threshold.numel() == places, "speccompile::cut_below_: the sizes do not fit");
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
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_linears", TORCH_BOX(&packed_linears));
  m.impl("int8_linears", TORCH_BOX(&rounded_linears<int8_weight>));
  m.impl("int8_linear", TORCH_BOX(&rounded_linear<int8_weight>));
  m.impl("int8_embedding", TORCH_BOX(&rounded_embedding<int8_weight>));
  m.impl("int4_linears", TORCH_BOX(&rounded_linears<int4_weight>));
  m.impl("int4_linear", TORCH_BOX(&rounded_linear<int4_weight>));
  m.impl("int4_embedding", TORCH_BOX(&rounded_embedding<int4_weight>));
  m.impl("packed_embedding", TORCH_BOX(&packed_embedding));
  m.impl("native_attention", TORCH_BOX(&native_attention));
  m.impl("choose_nearly", TORCH_BOX(&choose_nearly));
  m.impl("native_likeliest", TORCH_BOX(&native_likeliest));
  m.impl("native_greatest", TORCH_BOX(&native_greatest));
  m.impl("native_greatest_share", TORCH_BOX(&native_greatest_share));
  m.impl("native_mask_below_", TORCH_BOX(&native_cut_below));
}

}  // namespace
}  // namespace speccompile
