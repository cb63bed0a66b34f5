// Levels of a tree that a network drafts; speccompile/ops/draft_levels.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

constexpr float kNoChance = -std::numeric_limits<float>::infinity();

// Indices by chance, the greatest first, of equal ones the first. NaN counts as the chance 0.
void order_by_chance(const float* chances, int64_t count, std::vector<int64_t>& order) {
  const auto chance = [&](int64_t i) { return chances[i] > kNoChance ? chances[i] : kNoChance; };
  order.resize(count);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return chance(a) > chance(b); });
}

Tensor as_target_ids_op(const Tensor& tokens, const Tensor& ids) {
  const int64_t count = tokens.numel(), known = ids.numel();
  const Tensor own = side_by_side(tokens), found = new_integers({tokens.sizes().begin(), tokens.sizes().end()});
  const int64_t *from = integers(own), *names = integers(ids);
  int64_t* to = integers(found);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < count; ++i) {
          to[i] = from[i] < 0 ? -1 : names[checked_index(from[i], known, "as_target_ids")];
        }
      },
      tokens.is_contiguous());
  return found;
}

std::tuple<Tensor, Tensor, Tensor> next_level_op(
    const Tensor& tokens, const Tensor& logprobs, const std::optional<Tensor>& chances,
    const std::optional<Tensor>& index, int64_t first) {
  const int64_t rows = tokens.size(0), nodes = tokens.size(1), count = tokens.size(2);
  check_fit(
      logprobs.numel() == tokens.numel() && chances.has_value() == index.has_value() &&
          (!chances || (chances->numel() == rows * nodes && index->numel() == rows * nodes)),
      "next_level");
  const Tensor own = side_by_side(tokens), own_logprobs = side_by_side(logprobs);
  const std::optional<Tensor> above = chances ? std::optional<Tensor>(side_by_side(*chances)) : std::nullopt;
  const std::optional<Tensor> places = index ? std::optional<Tensor>(side_by_side(*index)) : std::nullopt;
  const Tensor found = new_integers({rows, nodes * count}), sums = new_floats({rows, nodes * count}),
               parents = new_integers({rows, nodes * count});
  const int64_t *from = integers(own), *at = places ? integers(*places) : nullptr;
  const float *given = floats(own_logprobs), *before = above ? floats(*above) : nullptr;
  int64_t *to = integers(found), *to_parents = integers(parents);
  auto* to_sums = static_cast<float*>(sums.data_ptr());
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * nodes * count; ++i) {
          to[i] = from[i];
          to_sums[i] = before ? before[i / count] + given[i] : given[i];
          to_parents[i] = at ? at[i / count] + first + 1 : 0;
        }
      },
      tokens.is_contiguous() && logprobs.is_contiguous() && (!chances || (chances->is_contiguous() && index->is_contiguous())));
  return {found, sums, parents};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> choose_nodes_op(
    const Tensor& tokens, const Tensor& chances, int64_t count, const std::vector<int64_t>& fixed, int64_t branches) {
  const int64_t rows = tokens.size(0), width = tokens.size(1);
  check_fit(
      chances.numel() == tokens.numel() && count <= width && branches > 0 &&
          (fixed.empty() || static_cast<int64_t>(fixed.size()) == count),
      "choose_nodes");
  for (const int64_t place : fixed) {
    checked_index(place, width, "choose_nodes");
  }
  const Tensor own = side_by_side(tokens), own_chances = side_by_side(chances);
  const Tensor read = new_integers({rows, count}), sums = new_floats({rows, count}), index = new_integers({rows, count}),
               came_from = new_integers({rows, count});
  const int64_t* from = integers(own);
  const float* given = floats(own_chances);
  int64_t *to = integers(read), *to_index = integers(index), *to_parents = integers(came_from);
  auto* to_sums = static_cast<float*>(sums.data_ptr());
  run_kernel(
      [=] {
        std::vector<int64_t> order = fixed;
        for (int64_t row = 0; row < rows; ++row) {
          if (fixed.empty()) {
            order_by_chance(given + row * width, width, order);
          }
          for (int64_t i = 0; i < count; ++i) {
            const int64_t place = order[i], at = row * count + i;
            to[at] = std::max<int64_t>(from[row * width + place], 0);
            to_sums[at] = given[row * width + place];
            to_index[at] = place;
            to_parents[at] = place / branches;
          }
        }
      },
      tokens.is_contiguous() && chances.is_contiguous());
  return {read, sums, index, came_from};
}

std::tuple<Tensor, Tensor> with_nodes_op(
    const Tensor& tokens, const Tensor& came_from, const std::optional<Tensor>& read_tokens,
    const std::optional<Tensor>& read_parents, int64_t begin) {
  const int64_t rows = tokens.size(0), count = tokens.size(1), before = read_tokens ? read_tokens->size(1) : 0;
  check_fit(
      came_from.numel() == tokens.numel() && read_tokens.has_value() == read_parents.has_value() &&
          (!read_tokens || (read_tokens->numel() == rows * before && read_parents->numel() == rows * before)),
      "with_nodes");
  const auto given = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional<Tensor>(side_by_side(*tensor)) : std::nullopt;
  };
  const Tensor own = side_by_side(tokens), own_parents = side_by_side(came_from);
  const std::optional<Tensor> old = given(read_tokens), old_parents = given(read_parents);
  const int64_t width = before + count;
  const Tensor all = new_integers({rows, width}), parents = new_integers({rows, width});
  const int64_t *from = integers(own), *of = integers(own_parents);
  const int64_t *first = old ? integers(*old) : nullptr, *first_of = old ? integers(*old_parents) : nullptr;
  int64_t *to = integers(all), *to_parents = integers(parents);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          if (before > 0) {
            std::copy_n(first + row * before, before, to + row * width);
            std::copy_n(first_of + row * before, before, to_parents + row * width);
          }
          for (int64_t i = 0; i < count; ++i) {
            to[row * width + before + i] = from[row * count + i];
            to_parents[row * width + before + i] = begin < 0 ? -1 : of[row * count + i] + begin;
          }
        }
      },
      tokens.is_contiguous() && came_from.is_contiguous() &&
          (!read_tokens || (read_tokens->is_contiguous() && read_parents->is_contiguous())));
  return {all, parents};
}

Tensor first_place_op(const Tensor& length, const Tensor& slots, int64_t ahead, int64_t most) {
  const int64_t rows = slots.numel(), slot_count = length.numel();
  const Tensor own_slots = side_by_side(slots), found = new_integers({rows});
  const int64_t *lengths = integers(length), *slot_of = integers(own_slots);
  int64_t* to = integers(found);
  run_kernel(
      [=] {
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t place = lengths[checked_index(slot_of[row], slot_count, "first_place")] - ahead;
          to[row] = std::min(std::max<int64_t>(place, 0), most);
        }
      },
      slots.is_contiguous());
  return found;
}

std::tuple<Tensor, Tensor> positions_of_nodes_op(const Tensor& first, const std::vector<int64_t>& levels) {
  const int64_t rows = first.numel(), count = static_cast<int64_t>(levels.size());
  const Tensor own = side_by_side(first), positions = new_integers({rows, count}), places = new_integers({rows, count});
  const int64_t* from = integers(own);
  int64_t *to = integers(positions), *to_places = integers(places);
  run_kernel(
      [=] {
        for (int64_t i = 0; i < rows * count; ++i) {
          to[i] = from[i / count] + levels[i % count] - 1;
          to_places[i] = from[i / count] + i % count;
        }
      },
      first.is_contiguous());
  return {positions, places};
}

std::tuple<Tensor, Tensor, Tensor> likeliest_tree_op(
    const Tensor& tokens, const Tensor& chances, const Tensor& parents, const Tensor& length, const Tensor& limit,
    const Tensor& slots, const std::vector<int64_t>& depths, int64_t max_len, int64_t nodes) {
  const int64_t rows = tokens.size(0), width = tokens.size(1), kept = std::min(width, nodes), slot_count = length.numel();
  check_fit(
      chances.numel() == tokens.numel() && parents.numel() == tokens.numel() && slots.numel() == rows &&
          static_cast<int64_t>(depths.size()) == width && limit.numel() == slot_count,
      "likeliest_tree");
  const Tensor own = side_by_side(tokens), own_chances = side_by_side(chances), own_parents = side_by_side(parents),
               own_slots = side_by_side(slots);
  const Tensor found = new_integers({rows, kept}), above = new_integers({rows, kept}), count = new_integers({rows});
  const int64_t *from = integers(own), *of = integers(own_parents), *slot_of = integers(own_slots);
  const int64_t *lengths = integers(length), *limits = integers(limit);
  const float* given = floats(own_chances);
  int64_t *to = integers(found), *to_parents = integers(above), *to_count = integers(count);
  run_kernel(
      [=] {
        std::vector<int64_t> order, number(width);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t slot = checked_index(slot_of[row], slot_count, "likeliest_tree");
          const int64_t room = std::max<int64_t>(max_len - 1 - lengths[slot], 0);
          const int64_t longest = std::max<int64_t>(std::min(room, limits[slot] - lengths[slot] - 1), 0);
          const float* const chance = given + row * width;
          order_by_chance(chance, width, order);
          for (int64_t i = 0; i < width; ++i) {
            number[order[i]] = i + 1;
          }
          for (int64_t i = 0; i < kept; ++i) {
            const int64_t place = order[i], parent = of[row * width + place];
            const bool inside = depths[place] <= longest && chance[place] > kNoChance;
            to[row * kept + i] = inside ? from[row * width + place] : -1;
            to_parents[row * kept + i] = parent == 0 ? 0 : number[checked_index(parent - 1, width, "likeliest_tree")];
          }
          to_count[row] = longest > 0 ? kept : 0;
        }
      },
      tokens.is_contiguous() && chances.is_contiguous() && parents.is_contiguous() && slots.is_contiguous());
  return {found, above, count};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("as_target_ids", TORCH_BOX(&as_target_ids_op));
  m.impl("next_level", TORCH_BOX(&next_level_op));
  m.impl("choose_nodes", TORCH_BOX(&choose_nodes_op));
  m.impl("with_nodes", TORCH_BOX(&with_nodes_op));
  m.impl("first_place", TORCH_BOX(&first_place_op));
  m.impl("positions_of_nodes", TORCH_BOX(&positions_of_nodes_op));
  m.impl("likeliest_tree", TORCH_BOX(&likeliest_tree_op));
}

}  // namespace
}  // namespace speccompile
