// Pairs of a token and an expert, as linears over the weights of chosen experts share them out.
#pragma once

#include <cstdint>
#include <vector>

#include "share.h"
#include "tensors.h"

namespace speccompile {

// The pairs of each expert side by side: expert e has places [begin[e], begin[e + 1]) of `pairs`.
struct ChosenExperts {
  std::vector<int64_t> begin, pairs;

  // Of experts[tokens, each]. Pairs whose expert is `count` or more belong to none.
  ChosenExperts(const Tensor& experts, int64_t count) : begin(count + 1), pairs(experts.numel()) {
    const auto* expert_of = static_cast<const int64_t*>(experts.data_ptr());
    for (int64_t pair = 0; pair < experts.numel(); ++pair) {
      STD_TORCH_CHECK(expert_of[pair] >= 0, "speccompile::expert_linear: experts must be >= 0, got ", expert_of[pair]);
      if (expert_of[pair] < count) {
        ++begin[expert_of[pair] + 1];
      }
    }
    for (int64_t expert = 0; expert < count; ++expert) {
      begin[expert + 1] += begin[expert];
    }
    std::vector<int64_t> at(begin.begin(), begin.end() - 1);
    for (int64_t pair = 0; pair < experts.numel(); ++pair) {
      if (expert_of[pair] < count) {
        pairs[at[expert_of[pair]]++] = pair;
      }
    }
  }

  // Pairs that belong to an expert.
  int64_t chosen() const {
    return begin.back();
  }

  // Calls `run(expert, panel, first place, pairs)` for each panel of outputs of each expert that a pair has.
  template <typename Run>
  void over_panels(int64_t panels, const Run& run) const {
    // The cost of a panel's weights, which are read from memory, in rows that it is multiplied with.
    constexpr int64_t kReading = 8;
    struct Item {
      int64_t expert, panel;
    };
    std::vector<Item> items;
    std::vector<int64_t> costs;
    for (int64_t expert = 0; expert + 1 < static_cast<int64_t>(begin.size()); ++expert) {
      const int64_t rows = begin[expert + 1] - begin[expert];
      for (int64_t panel = 0; rows > 0 && panel < panels; ++panel) {
        items.push_back({expert, panel});
        costs.push_back(kReading + rows);
      }
    }
    share_out(costs, [&](int64_t i) {
      const int64_t expert = items[i].expert;
      run(expert, items[i].panel, begin[expert], begin[expert + 1] - begin[expert]);
    });
  }
};

// Sizes of a linear over chosen experts: x[P, K], which all k experts of a token read, or x[P, k, K].
struct ExpertInputs {
  int64_t tokens, each, depth;
  bool own;

  ExpertInputs(const Tensor& x, const Tensor& experts, int64_t depth)
      : tokens(experts.size(0)), each(experts.size(1)), depth(depth), own(x.dim() == 3) {
    STD_TORCH_CHECK(
        experts.dim() == 2 && experts.scalar_type() == ScalarType::Long && (own || x.dim() == 2) &&
            x.size(0) == tokens && (!own || x.size(1) == each) && x.size(-1) == depth,
        "speccompile::expert_linear: the sizes do not fit, or experts are not [P, k] of int64");
  }

  // Where the input of a pair begins.
  int64_t at(int64_t pair) const {
    return (own ? pair : pair / each) * depth;
  }
};

}  // namespace speccompile
