// What low-rank adapters add to linears, as torch sees it; speccompile/ops/lora.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lora.h"
#include "../base/ops/share.h"
#include "../base/ops/shims.h"

namespace speccompile {
namespace {

// Multiply-adds that are work enough for a thread: their weights take about as long to come from memory as sharing them
// out does.
constexpr int64_t kLoraPiece = 16384;

int64_t grain_of(int64_t cost) {
  return std::max<int64_t>(1, kLoraPiece / std::max<int64_t>(1, cost));
}

// Tokens with one adapter, among those of a step that have any.
struct LoraGroup {
  int64_t place, begin, count;
};

// The tokens of a step that have an adapter, those of each adapter side by side.
struct LoraStep {
  std::vector<LoraGroup> groups;
  std::vector<int64_t> tokens;
};

LoraStep tokens_by_adapter(const Tensor& places, int64_t tokens, int64_t count) {
  const int64_t rows = places.size(0), width = rows ? tokens / rows : 0;
  STD_TORCH_CHECK(
      places.dim() == 1 && places.scalar_type() == ScalarType::Long && rows * width == tokens,
      "speccompile::lora: ", tokens, " tokens are not shared out evenly among ", rows, " rows");
  const Tensor own = side_by_side(places);
  const auto* place_of = static_cast<const int64_t*>(own.data_ptr());
  LoraStep step;
  for (int64_t first = 0; first < rows; ++first) {
    const int64_t place = place_of[first];
    STD_TORCH_CHECK(place >= -1 && place < count, "speccompile::lora: row ", first, " has the adapter ", place);
    if (place < 0 || std::find(place_of, place_of + first, place) != place_of + first) {
      continue;
    }
    const auto begin = static_cast<int64_t>(step.tokens.size());
    for (int64_t row = first; row < rows; ++row) {
      for (int64_t i = 0; place_of[row] == place && i < width; ++i) {
        step.tokens.push_back(row * width + i);
      }
    }
    step.groups.push_back({place, begin, static_cast<int64_t>(step.tokens.size()) - begin});
  }
  return step;
}

LoraBuffers buffers_of(const Tensor& down, const Tensor& up, int64_t depth, int64_t features) {
  const int64_t most = down.size(2);
  STD_TORCH_CHECK(
      down.is_contiguous() && up.is_contiguous() && down.scalar_type() == up.scalar_type() && down.size(1) == depth &&
          most % kRanks == 0 && up.size(0) == down.size(0) && up.size(1) == lora_blocks(features) &&
          up.size(2) == most && up.size(3) == kLoraColumns,
      "speccompile::lora: the sizes of an adapter's buffers do not fit");
  return {type_of(down), down.data_ptr(), up.data_ptr(), depth, features, most};
}

}  // namespace

std::vector<Tensor> native_lora(
    const Tensor& x, const std::vector<Tensor>& outputs, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
    const Tensor& ranks, const Tensor& scales, int64_t first, const Tensor& places) {
  const int64_t depth = x.size(-1), tokens = x.numel() / depth, count = ranks.size(0), linears = ranks.size(1);
  STD_TORCH_CHECK(
      a.size() == outputs.size() && b.size() == outputs.size() && first + static_cast<int64_t>(a.size()) <= linears &&
          ranks.is_contiguous() && ranks.scalar_type() == ScalarType::Long && scales.is_contiguous() &&
          scales.scalar_type() == ScalarType::Float && scales.numel() == ranks.numel(),
      "speccompile::lora: ranks and scales do not fit");
  const LoraStep step = tokens_by_adapter(places, tokens, count);
  const auto* rank_of = static_cast<const int64_t*>(ranks.data_ptr());
  const auto* scale_of = static_cast<const float*>(scales.data_ptr());
  const Tensor input = side_by_side(as_float(x));
  const auto* from = static_cast<const float*>(input.data_ptr());
  const auto with_adapter = static_cast<int64_t>(step.tokens.size());

  std::vector<LoraBuffers> buffers;
  std::vector<Tensor> old, results;
  std::vector<int64_t> offsets;
  int64_t hidden_size = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const int64_t features = outputs[i].size(-1);
    STD_TORCH_CHECK(
        outputs[i].numel() == tokens * features && a[i].size(0) == count,
        "speccompile::lora: the sizes of an output do not fit");
    buffers.push_back(buffers_of(a[i], b[i], depth, features));
    old.push_back(side_by_side(as_float(outputs[i])));
    results.push_back(new_floats({outputs[i].sizes().begin(), outputs[i].sizes().end()}));
    offsets.push_back(hidden_size);
    hidden_size += with_adapter * buffers[i].most;
  }
  thread_local std::vector<float> kept;
  kept.resize(std::max<size_t>(kept.size(), hidden_size));
  float* const hidden = kept.data();
  const auto tokens_of = [&](const LoraGroup& group, size_t linear) {
    const int64_t at = group.place * linears + first + static_cast<int64_t>(linear);
    return LoraTokens{group.place, rank_of[at], scale_of[at], step.tokens.data() + group.begin, group.count};
  };

  struct Down {
    size_t linear, group;
    int64_t rank;
  };
  std::vector<Down> downs;
  for (size_t linear = 0; linear < outputs.size(); ++linear) {
    for (size_t group = 0; group < step.groups.size(); ++group) {
      const int64_t rank = tokens_of(step.groups[group], linear).rank;
      STD_TORCH_CHECK(rank >= 0 && rank <= buffers[linear].most, "speccompile::lora: an adapter has the rank ", rank);
      for (int64_t begin = 0; begin < rank; begin += kRanks) {
        downs.push_back({linear, group, begin});
      }
    }
  }
  const int64_t down_cost = depth * kRanks;
  parallel_for(0, static_cast<int64_t>(downs.size()), grain_of(down_cost), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Down& item = downs[i];
      const LoraGroup& group = step.groups[item.group];
      const LoraBuffers& of = buffers[item.linear];
      lora_down(of, tokens_of(group, item.linear), item.rank, from, hidden + offsets[item.linear] + group.begin * of.most);
    }
  });

  int64_t all_blocks = 0;
  for (const LoraBuffers& of : buffers) {
    all_blocks += lora_blocks(of.features);
  }
  const int64_t ranks_of_groups = static_cast<int64_t>(step.groups.size()) * kRanks;
  const int64_t up_cost = kLoraColumns * std::max<int64_t>(ranks_of_groups, tokens / 4);
  parallel_for(0, all_blocks, grain_of(up_cost), [&](int64_t begin, int64_t end) {
    int64_t passed = 0;
    for (size_t i = 0; i < buffers.size() && passed < end; ++i) {
      const LoraBuffers& of = buffers[i];
      const int64_t blocks = lora_blocks(of.features);
      const int64_t from_block = std::max(begin - passed, int64_t{0}), to_block = std::min(end - passed, blocks);
      passed += blocks;
      if (from_block >= to_block) {
        continue;
      }
      const auto* source = static_cast<const float*>(old[i].data_ptr());
      auto* target = static_cast<float*>(results[i].data_ptr());
      const int64_t column = from_block * kLoraColumns, columns = std::min(to_block * kLoraColumns, of.features) - column;
      for (int64_t token = 0; token < tokens; ++token) {
        const int64_t at = token * of.features + column;
        std::memcpy(target + at, source + at, columns * sizeof(float));
      }
      for (const LoraGroup& group : step.groups) {
        const LoraTokens mine = tokens_of(group, i);
        if (mine.rank > 0) {
          lora_up(of, mine, hidden + offsets[i] + group.begin * of.most, target, from_block, to_block);
        }
      }
    }
  });
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].scalar_type() != ScalarType::Float) {
      results[i] = torch::stable::to(results[i], outputs[i].scalar_type());
    }
  }
  return results;
}

SHIM aoti_torch_cpu_native_lora(
    Handle x, const Handle* outputs, int64_t linears, const Handle* a, int64_t all_a, const Handle* b, int64_t all_b,
    Handle ranks, Handle scales, int64_t first, Handle places, ...) {
  const Recorded recorded("speccompile::native_lora");
  const auto made = native_lora(
      shared(x), shared(outputs, linears), shared(a, all_a), shared(b, all_b), shared(ranks), shared(scales), first,
      shared(places));
  va_list out;
  va_start(out, places);
  hand_over(made, out);
  va_end(out);
  return AOTI_TORCH_SUCCESS;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_lora", TORCH_BOX(&native_lora));
}

}  // namespace speccompile
