// The ops of suffix decoding as torch sees them; speccompile/ops/suffix.py defines them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../kernels/suffix.h"
#include "kernel_calls.h"
#include "state_tensors.h"

namespace speccompile {
namespace {

using Drafts = std::tuple<Tensor, Tensor, Tensor>;

constexpr int32_t kSeparator = -1;

int32_t* table(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Int,
      "speccompile::suffix: its tables are int32, side by side");
  return static_cast<int32_t*>(tensor.data_ptr());
}

// The rows' sequences, and where their drafts go. It has addresses alone, so that a kernel call may keep it.
class Rows {
 public:
  Rows(
      const Tensor& slots, const Tensor& places, const Tensor& tokens, const Tensor& length, int64_t longest,
      const Drafts& results)
      : count_(slots.numel()), longest_(longest), capacity_(tokens.size(1)), slots_(integers(slots)),
        places_(integers(places)), tokens_(integers(tokens)), length_(integers(length)),
        drafts_(integers(std::get<0>(results))), lens_(integers(std::get<1>(results))),
        scores_(static_cast<float*>(std::get<2>(results).data_ptr())) {
    STD_TORCH_CHECK(places.numel() == count_, "speccompile::suffix: the sizes do not fit");
  }

  int64_t count() const {
    return count_;
  }
  int64_t slot(int64_t row) const {
    return slots_[row];
  }
  int64_t length(int64_t row) const {
    return length_[places_[row]];
  }
  int32_t token(int64_t row, int64_t place) const {
    return static_cast<int32_t>(tokens_[places_[row] * capacity_ + place]);
  }
  void clear() const {
    std::fill_n(drafts_, count_ * longest_, 0);
    std::fill_n(lens_, count_, 0);
    std::fill_n(scores_, count_ * longest_, 0.0f);
  }
  double propose(int64_t row, const Trie& trie, const int32_t* active, const Speculation& speculation) const {
    double expected = 0.0;
    const int64_t first = row * longest_;
    lens_[row] = trie.propose(active, longest_, speculation, drafts_ + first, scores_ + first, expected);
    return expected;
  }
  void put(int64_t row, const std::vector<int64_t>& drafts, const std::vector<float>& scores, int64_t found) const {
    lens_[row] = found;
    std::fill_n(drafts_ + row * longest_, longest_, 0);
    std::fill_n(scores_ + row * longest_, longest_, 0.0f);
    std::copy_n(drafts.begin(), found, drafts_ + row * longest_);
    std::copy_n(scores.begin(), found, scores_ + row * longest_);
  }

 private:
  int64_t count_, longest_, capacity_;
  const int64_t *slots_, *places_, *tokens_, *length_;
  int64_t *drafts_, *lens_;
  float* scores_;
};

Drafts new_drafts(const Tensor& slots, int64_t longest) {
  const int64_t rows = slots.numel();
  return {new_integers({rows, longest}), new_integers({rows}), new_floats({rows, longest})};
}

Drafts suffix_draft(
    Tensor used, Tensor active, Tensor nodes, Tensor index, const Tensor& slots, const Tensor& places,
    const Tensor& tokens, const Tensor& length, int64_t longest, double factor, double offset, double least) {
  const int64_t depth = active.size(1) - 1, capacity = nodes.size(2), entries = index.size(1);
  const Speculation speculation{depth, factor, offset, least};
  int32_t *counts = table(used), *all = table(active), *trees = table(nodes), *indexes = table(index);
  const Tensor own_slots = side_by_side(slots), own_places = side_by_side(places);
  const Drafts results = new_drafts(slots, longest);
  const Rows rows(own_slots, own_places, tokens, length, longest, results);
  run_kernel(
      [=] {
        rows.clear();
        for (int64_t row = 0; row < rows.count(); ++row) {
          const int64_t slot = rows.slot(row);
          Trie trie(
              counts + 2 * slot, trees + Trie::kFields * capacity * slot, capacity, indexes + entries * slot, entries);
          int32_t* suffixes = all + (depth + 1) * slot;
          if (trie.tokens() > rows.length(row)) {
            trie.clear();
            std::fill_n(suffixes, depth + 1, 0);
          }
          for (int64_t place = trie.tokens(); place < rows.length(row); ++place) {
            trie.learn(suffixes, depth, rows.token(row, place));
          }
          rows.propose(row, trie, suffixes, speculation);
        }
      },
      slots.is_contiguous() && places.is_contiguous());
  return results;
}

Drafts suffix_given(
    const Tensor& text, Tensor used, Tensor nodes, Tensor index, Tensor cursor, const Tensor& slots,
    const Tensor& places, const Tensor& tokens, const Tensor& length, int64_t longest, double factor, double offset,
    double least) {
  const int64_t depth = cursor.size(1) - 2, capacity = nodes.size(1), entries = index.size(0), given = text.size(0);
  const Speculation speculation{depth, factor, offset, least};
  int32_t *from = table(text), *counts = table(used), *tree = table(nodes), *indexes = table(index);
  int32_t* cursors = table(cursor);
  const Tensor own_slots = side_by_side(slots), own_places = side_by_side(places);
  const Drafts results = new_drafts(slots, longest);
  const Rows rows(own_slots, own_places, tokens, length, longest, results);
  run_kernel(
      [=] {
        rows.clear();
        Trie trie(counts, tree, capacity, indexes, entries);
        if (trie.tokens() == 0) {
          std::vector<int32_t> suffixes(depth + 1, 0);
          for (int64_t place = 0; place < given; ++place) {
            if (from[place] == kSeparator) {
              std::fill(suffixes.begin(), suffixes.end(), 0);
            } else {
              trie.learn(suffixes.data(), depth, from[place]);
            }
          }
        }
        for (int64_t row = 0; row < rows.count(); ++row) {
          int32_t* own = cursors + (depth + 2) * rows.slot(row);
          if (own[0] > rows.length(row)) {
            std::fill_n(own, depth + 2, 0);
          }
          for (int64_t place = own[0]; place < rows.length(row); ++place) {
            trie.follow(own + 1, depth, rows.token(row, place));
          }
          own[0] = static_cast<int32_t>(rows.length(row));
          rows.propose(row, trie, own + 1, speculation);
        }
      },
      slots.is_contiguous() && places.is_contiguous());
  return results;
}

Drafts suffix_earlier(
    Tensor used, Tensor nodes, Tensor index, Tensor cursor, int64_t most, const Tensor& slots, const Tensor& places,
    const Tensor& tokens, const Tensor& length, int64_t longest, double factor, double offset, double least) {
  const int64_t width = cursor.size(1), depth = (width - 1) / 2 - 1, count = cursor.size(0);
  const int64_t capacity = nodes.size(2), entries = index.size(1);
  const Speculation speculation{depth, factor, offset, least};
  int32_t *counts = table(used), *all = table(cursor), *trees = table(nodes), *indexes = table(index);
  const Tensor own_slots = side_by_side(slots), own_places = side_by_side(places);
  const Drafts results = new_drafts(slots, longest);
  const Rows rows(own_slots, own_places, tokens, length, longest, results);
  run_kernel(
      [=] {
        rows.clear();
        Trie tries[2] = {
            Trie(counts, trees, capacity, indexes, entries),
            Trie(counts + 2, trees + Trie::kFields * capacity, capacity, indexes + entries, entries)};
        int32_t& young = counts[4];
        const auto part = [&](int64_t slot, int32_t side) { return all + width * slot + 1 + side * (depth + 1); };
        std::vector<int64_t> drafts(longest);
        std::vector<float> scores(longest);
        for (int64_t row = 0; row < rows.count(); ++row) {
          const int64_t slot = rows.slot(row);
          if (slot == count - 1) {
            continue;
          }
          int32_t* own = all + width * slot;
          if (own[0] > rows.length(row)) {
            std::fill_n(own, width, 0);
          }
          for (int64_t place = own[0]; place < rows.length(row); ++place) {
            if (tries[young].tokens() >= most) {
              young = 1 - young;
              tries[young].clear();
              for (int64_t other = 0; other < count; ++other) {
                std::fill_n(part(other, young), depth + 1, 0);
              }
            }
            const int32_t token = rows.token(row, place);
            tries[young].learn(part(slot, young), depth, token);
            tries[1 - young].follow(part(slot, 1 - young), depth, token);
          }
          own[0] = static_cast<int32_t>(rows.length(row));
          const double newer = rows.propose(row, tries[young], part(slot, young), speculation);
          double older = 0.0;
          const int64_t found = tries[1 - young].propose(
              part(slot, 1 - young), longest, speculation, drafts.data(), scores.data(), older);
          if (older > newer) {
            rows.put(row, drafts, scores, found);
          }
        }
      },
      slots.is_contiguous() && places.is_contiguous());
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> suffix_tree(
    const Tensor& nodes, const Tensor& which, const Tensor& cursor, const Tensor& slots, int64_t first, int64_t count,
    int64_t longest) {
  const Tensor tries = side_by_side(which), own_slots = side_by_side(slots);
  const int64_t rows = which.size(0), capacity = nodes.size(2), trie_count = nodes.size(0), depth = count - 1;
  const int64_t slot_count = cursor.size(0), width = cursor.size(1);
  STD_TORCH_CHECK(
      slots.numel() == rows && first >= 0 && count > 0 && first + count <= width,
      "speccompile::suffix_tree: the sizes do not fit");
  const Tensor tokens = new_integers({rows, longest}), parents = new_integers({rows, longest}),
               counts = new_integers({rows}), scores = new_floats({rows, longest});
  const int64_t *trie_of = integers(tries), *slot_of = integers(own_slots);
  int32_t *all = table(nodes), *suffixes = table(cursor);
  int64_t *to = integers(tokens), *to_parents = integers(parents), *to_counts = integers(counts);
  auto* const to_scores = static_cast<float*>(scores.data_ptr());
  run_kernel(
      [=] {
        std::fill_n(to, rows * longest, int64_t{0});
        std::fill_n(to_parents, rows * longest, int64_t{0});
        std::fill_n(to_scores, rows * longest, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t trie = trie_of[row], slot = slot_of[row], at = row * longest;
          STD_TORCH_CHECK(
              trie >= 0 && trie < trie_count && slot >= 0 && slot < slot_count, "speccompile: row ", row,
              " has no slot ", slot, " or no trie ", trie);
          // Paths are read off the nodes alone.
          const Trie of(nullptr, all + Trie::kFields * capacity * trie, capacity, nullptr, 0);
          to_counts[row] = of.propose_tree(
              suffixes + slot * width + first, depth, longest, to + at, to_parents + at, to_scores + at);
        }
      },
      which.is_contiguous() && slots.is_contiguous());
  return {tokens, parents, counts, scores};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("suffix_tree", TORCH_BOX(&suffix_tree));
  m.impl("suffix_draft_", TORCH_BOX(&suffix_draft));
  m.impl("suffix_given_", TORCH_BOX(&suffix_given));
  m.impl("suffix_earlier_", TORCH_BOX(&suffix_earlier));
}

}  // namespace
}  // namespace speccompile
