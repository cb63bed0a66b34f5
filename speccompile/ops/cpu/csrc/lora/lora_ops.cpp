// What low-rank adapters add to linears, as torch sees it; speccompile/ops/lora.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lora.h"
#include "../base/ops/share.h"
#include "../base/ops/shims.h"
#include "view.h"

namespace speccompile {
namespace {

// Multiply-adds that are work enough for a thread: their weights take about as long to come from memory as sharing them
// out does.
constexpr int64_t kLoraPiece = 16384;
// Numbers that are copied in the time of a multiply-add.
constexpr int64_t kCopied = 4;
// Tokens of a piece: as many as read the weights together in registers.
constexpr int64_t kPieceTokens = 8;

int64_t grain_of(int64_t cost) {
  return std::max<int64_t>(1, kLoraPiece / std::max<int64_t>(1, cost));
}

// Tokens with one adapter, or with none: place -1.
struct LoraGroup {
  int64_t place, begin, count;
};

// The tokens of a step, those of each adapter side by side.
struct LoraStep {
  std::vector<LoraGroup> groups;
  std::vector<int64_t> tokens;
};

LoraStep tokens_by_adapter(const View& places, int64_t tokens, int64_t count) {
  const int64_t rows = places.size(0), width = rows ? tokens / rows : 0;
  STD_TORCH_CHECK(
      places.dim() == 1 && places.dtype() == aoti_torch_dtype_int64() && rows * width == tokens,
      "speccompile::lora: ", tokens, " tokens are not shared out evenly among ", rows, " rows");
  std::vector<Tensor> kept;
  const auto* place_of = static_cast<const int64_t*>(side_by_side(places, kept).data());
  LoraStep step;
  step.groups.reserve(rows);
  step.tokens.reserve(tokens);
  for (int64_t first = 0; first < rows; ++first) {
    const int64_t place = place_of[first];
    STD_TORCH_CHECK(place >= -1 && place < count, "speccompile::lora: row ", first, " has the adapter ", place);
    if (std::find(place_of, place_of + first, place) != place_of + first) {
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

// A linear: where its outputs are, and where the results go.
struct LoraLinear {
  LoraBuffers buffers;
  Type type;
  const char* old;
  char* y;
};

// Tokens of one linear that a thread computes at once, with rank 0 where nothing is added to them.
struct LoraPiece {
  const LoraLinear* linear;
  LoraTokens tokens;
  float* hidden;
};

int64_t rank_parts(const LoraPiece& piece) {
  return (piece.tokens.rank + kRanks - 1) / kRanks;
}

// Blocks of the second matrix; tokens that are copied are one part.
int64_t up_parts(const LoraPiece& piece) {
  return piece.tokens.rank ? lora_blocks(piece.linear->buffers.features) : 1;
}

// Calls `run(piece, first, last)` for parts of each of them, of [0, size(piece)).
template <typename Size, typename Run>
void over_parts(const std::vector<LoraPiece>& pieces, int64_t grain, Size size, Run run) {
  int64_t all = 0;
  for (const LoraPiece& piece : pieces) {
    all += size(piece);
  }
  parallel_for(0, all, grain, [&](int64_t first, int64_t last) {
    int64_t begun = 0;
    for (const LoraPiece& piece : pieces) {
      const int64_t own = size(piece), from = std::max(first - begun, int64_t{0}), to = std::min(last - begun, own);
      if (from < to) {
        run(piece, from, to);
      }
      begun += own;
    }
  });
}

int64_t cost_of(const LoraPiece& piece) {
  const LoraBuffers& of = piece.linear->buffers;
  const int64_t rank = piece.tokens.rank;
  return piece.tokens.count * (rank ? rank * (of.depth + of.features) : of.features / kCopied);
}

void copy_tokens(const LoraPiece& piece) {
  const int64_t bytes = piece.linear->buffers.features * (piece.linear->type == Type::Float ? 4 : 2);
  for (int64_t i = 0; i < piece.tokens.count; ++i) {
    const int64_t at = piece.tokens.tokens[i] * bytes;
    std::memcpy(piece.linear->y + at, piece.linear->old + at, bytes);
  }
}

LoraBuffers buffers_of(const View& down, const View& up, int64_t depth, int64_t features) {
  const int64_t most = down.size(2);
  STD_TORCH_CHECK(
      down.is_contiguous() && up.is_contiguous() && down.dtype() == up.dtype() && down.size(1) == depth &&
          most % kRanks == 0 && up.size(0) == down.size(0) && up.size(1) == lora_blocks(features) &&
          up.size(2) == most && up.size(3) == kColumns,
      "speccompile::lora: the sizes of an adapter's buffers do not fit");
  return {type_of(down), down.data(), up.data(), depth, features, most};
}

// `most` tokens in a piece. Rows of ranks and scales have `stride` numbers, and begin with those of the first linear.
std::vector<LoraPiece> pieces_of(
    const std::vector<LoraLinear>& linears, const LoraStep& step, int64_t most, const int64_t* ranks,
    const float* scales, int64_t stride) {
  const size_t tokens = step.tokens.size();
  int64_t hidden_size = 0;
  for (const LoraLinear& linear : linears) {
    hidden_size += static_cast<int64_t>(tokens) * linear.buffers.most;
  }
  thread_local std::vector<float> kept;
  kept.resize(std::max<size_t>(kept.size(), hidden_size));
  float* hidden = kept.data();
  std::vector<LoraPiece> pieces;
  pieces.reserve(linears.size() * (step.groups.size() + tokens / most));
  for (size_t i = 0; i < linears.size(); ++i) {
    const LoraLinear& linear = linears[i];
    for (const LoraGroup& group : step.groups) {
      const int64_t at = group.place * stride + static_cast<int64_t>(i), rank = group.place < 0 ? 0 : ranks[at];
      STD_TORCH_CHECK(rank >= 0 && rank <= linear.buffers.most, "speccompile::lora: an adapter has the rank ", rank);
      for (int64_t begin = 0; begin < group.count; begin += most) {
        const LoraTokens some{
            group.place, rank, rank ? scales[at] : 0.0f, step.tokens.data() + group.begin + begin,
            std::min(most, group.count - begin)};
        pieces.push_back({&linear, some, hidden});
        hidden += some.count * linear.buffers.most;
      }
    }
  }
  return pieces;
}

std::vector<Tensor> lora(
    const View& x, const std::vector<View>& outputs, const std::vector<View>& a, const std::vector<View>& b,
    const View& ranks, const View& scales, int64_t first, const View& places) {
  const int64_t depth = x.size(-1), tokens = x.numel() / depth, count = ranks.size(0), all = ranks.size(1);
  STD_TORCH_CHECK(
      a.size() == outputs.size() && b.size() == outputs.size() && first + static_cast<int64_t>(a.size()) <= all &&
          ranks.is_contiguous() && ranks.dtype() == aoti_torch_dtype_int64() && scales.is_contiguous() &&
          scales.dtype() == aoti_torch_dtype_float32() && scales.numel() == ranks.numel(),
      "speccompile::lora: ranks and scales do not fit");
  const LoraStep step = tokens_by_adapter(places, tokens, count);
  std::vector<Tensor> kept, results;
  const Type type = type_of(x);
  const void* const from = side_by_side(x, kept).data();
  std::vector<LoraLinear> linears;
  linears.reserve(outputs.size()), results.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const int64_t features = outputs[i].size(-1);
    STD_TORCH_CHECK(
        outputs[i].numel() == tokens * features && a[i].size(0) == count,
        "speccompile::lora: the sizes of an output do not fit");
    const View old = side_by_side(outputs[i], kept);
    results.push_back(old.new_like());
    linears.push_back(
        {buffers_of(a[i], b[i], depth, features), type_of(old), static_cast<const char*>(old.data()),
         static_cast<char*>(results[i].data_ptr())});
  }
  // Of few tokens so many at once that each thread has some.
  const int64_t threads = thread_count();
  const int64_t most =
      std::clamp<int64_t>(static_cast<int64_t>(outputs.size()) * tokens / threads, 1, kPieceTokens);
  const std::vector<LoraPiece> pieces = pieces_of(
      linears, step, most, static_cast<const int64_t*>(ranks.data()) + first,
      static_cast<const float*>(scales.data()) + first, all);

  const auto piece_count = static_cast<int64_t>(pieces.size());
  const auto down = [&](const LoraPiece& piece, int64_t begin, int64_t end) {
    const LoraBuffers& of = piece.linear->buffers;
    for (int64_t part = begin; part < end; ++part) {
      lora_down(of, piece.tokens, part * kRanks, type, from, piece.hidden, lora_up_at(of, piece.tokens.place));
    }
  };
  // What is read next is the first matrix of the next piece.
  const auto up = [&](const LoraPiece& piece, int64_t begin, int64_t end) {
    const LoraLinear& linear = *piece.linear;
    if (piece.tokens.rank == 0) {
      return copy_tokens(piece);
    }
    const LoraPiece& next = &piece == &pieces.back() ? piece : (&piece)[1];
    lora_up(
        linear.buffers, piece.tokens, piece.hidden, linear.type, linear.old, linear.y, begin, end,
        lora_down_at(next.linear->buffers, std::max<int64_t>(next.tokens.place, 0)));
  };
  if (piece_count >= threads) {
    int64_t cost = 0;
    for (const LoraPiece& piece : pieces) {
      cost += cost_of(piece);
    }
    const int64_t grain = grain_of(cost / std::max<int64_t>(piece_count, 1));
    parallel_for(0, piece_count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        down(pieces[i], 0, rank_parts(pieces[i]));
        up(pieces[i], 0, up_parts(pieces[i]));
      }
    });
  } else {
    // The threads share each of them: first all inputs, then the outputs.
    over_parts(pieces, grain_of(depth * kRanks * most), rank_parts, down);
    over_parts(pieces, grain_of(kColumns * kRanks * most), up_parts, up);
  }
  return results;
}

std::vector<Tensor> native_lora(
    const Tensor& x, const std::vector<Tensor>& outputs, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
    const Tensor& ranks, const Tensor& scales, int64_t first, const Tensor& places) {
  return lora(
      View(x.get()), views(outputs), views(a), views(b), View(ranks.get()), View(scales.get()), first,
      View(places.get()));
}

}  // namespace

SHIM aoti_torch_cpu_native_lora(
    Handle x, const Handle* outputs, int64_t linears, const Handle* a, int64_t all_a, const Handle* b, int64_t all_b,
    Handle ranks, Handle scales, int64_t first, Handle places, ...) {
  const Recorded recorded("speccompile::native_lora");
  const auto made = lora(
      View(x), views(outputs, linears), views(a, all_a), views(b, all_b), View(ranks), View(scales), first,
      View(places));
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
