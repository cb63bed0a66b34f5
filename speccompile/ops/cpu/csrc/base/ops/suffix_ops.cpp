// The ops of suffix decoding as torch sees them; speccompile/ops/suffix.py defines them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../kernels/suffix.h"
#include "tensors.h"

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

// The rows' texts, and where their drafts go.
class Rows {
 public:
  Rows(const Tensor& slots, const Tensor& tokens, const Tensor& length, int64_t longest)
      : slots_(torch::stable::contiguous(slots)), tokens_(torch::stable::contiguous(tokens)),
        length_(torch::stable::contiguous(length)), longest_(longest),
        drafts_(torch::stable::new_zeros(slots, {slots.size(0), longest})),
        lens_(torch::stable::new_zeros(slots, {slots.size(0)})),
        scores_(torch::stable::new_zeros(slots, {slots.size(0), longest}, ScalarType::Float)) {
    for (const Tensor* tensor : {&slots, &tokens, &length}) {
      STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Long, "speccompile::suffix: rows are int64");
    }
  }

  int64_t count() const {
    return slots_.size(0);
  }
  int64_t longest() const {
    return longest_;
  }
  int64_t slot(int64_t row) const {
    return whole(slots_)[row];
  }
  int64_t length(int64_t row) const {
    return whole(length_)[row];
  }
  int32_t token(int64_t row, int64_t place) const {
    return static_cast<int32_t>(whole(tokens_)[row * tokens_.size(1) + place]);
  }
  double propose(int64_t row, const Trie& trie, const int32_t* active, const Speculation& speculation) {
    double expected = 0.0;
    whole(lens_)[row] =
        trie.propose(active, longest_, speculation, whole(drafts_) + row * longest_, scores(row), expected);
    return expected;
  }
  void put(int64_t row, const std::vector<int64_t>& drafts, const std::vector<float>& scores_of, int64_t found) {
    whole(lens_)[row] = found;
    std::fill_n(whole(drafts_) + row * longest_, longest_, 0);
    std::fill_n(scores(row), longest_, 0.0f);
    std::copy_n(drafts.begin(), found, whole(drafts_) + row * longest_);
    std::copy_n(scores_of.begin(), found, scores(row));
  }
  Drafts result() const {
    return {drafts_, lens_, scores_};
  }

 private:
  static int64_t* whole(const Tensor& tensor) {
    return static_cast<int64_t*>(tensor.data_ptr());
  }
  float* scores(int64_t row) const {
    return static_cast<float*>(scores_.data_ptr()) + row * longest_;
  }

  Tensor slots_, tokens_, length_;
  int64_t longest_;
  Tensor drafts_, lens_, scores_;
};

Drafts suffix_draft(
    Tensor used, Tensor active, Tensor nodes, Tensor index, const Tensor& slots, const Tensor& tokens,
    const Tensor& length, int64_t longest, double factor, double offset, double least) {
  const int64_t depth = active.size(1) - 1, capacity = nodes.size(2), places = index.size(1);
  const Speculation speculation{depth, factor, offset, least};
  int32_t *counts = table(used), *all = table(active), *trees = table(nodes), *indexes = table(index);
  Rows rows(slots, tokens, length, longest);
  for (int64_t row = 0; row < rows.count(); ++row) {
    const int64_t slot = rows.slot(row);
    Trie trie(counts + 2 * slot, trees + Trie::kFields * capacity * slot, capacity, indexes + places * slot, places);
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
  return rows.result();
}

Drafts suffix_given(
    const Tensor& text, Tensor used, Tensor nodes, Tensor index, Tensor cursor, const Tensor& slots,
    const Tensor& tokens, const Tensor& length, int64_t longest, double factor, double offset, double least) {
  const int64_t depth = cursor.size(1) - 2;
  const Speculation speculation{depth, factor, offset, least};
  Trie trie(table(used), table(nodes), nodes.size(1), table(index), index.size(0));
  if (trie.tokens() == 0) {
    std::vector<int32_t> suffixes(depth + 1, 0);
    const int32_t* from = table(text);
    for (int64_t place = 0; place < text.size(0); ++place) {
      if (from[place] == kSeparator) {
        std::fill(suffixes.begin(), suffixes.end(), 0);
      } else {
        trie.learn(suffixes.data(), depth, from[place]);
      }
    }
  }
  Rows rows(slots, tokens, length, longest);
  for (int64_t row = 0; row < rows.count(); ++row) {
    int32_t* own = table(cursor) + (depth + 2) * rows.slot(row);
    if (own[0] > rows.length(row)) {
      std::fill_n(own, depth + 2, 0);
    }
    for (int64_t place = own[0]; place < rows.length(row); ++place) {
      trie.follow(own + 1, depth, rows.token(row, place));
    }
    own[0] = static_cast<int32_t>(rows.length(row));
    rows.propose(row, trie, own + 1, speculation);
  }
  return rows.result();
}

Drafts suffix_earlier(
    Tensor used, Tensor nodes, Tensor index, Tensor cursor, int64_t room, const Tensor& slots, const Tensor& tokens,
    const Tensor& length, int64_t longest, double factor, double offset, double least) {
  const int64_t width = cursor.size(1), depth = (width - 1) / 2 - 1, count = cursor.size(0);
  const int64_t capacity = nodes.size(2), places = index.size(1);
  const Speculation speculation{depth, factor, offset, least};
  int32_t *counts = table(used), *all = table(cursor);
  Trie tries[2] = {
      Trie(counts, table(nodes), capacity, table(index), places),
      Trie(counts + 2, table(nodes) + Trie::kFields * capacity, capacity, table(index) + places, places)};
  int32_t& young = counts[4];
  const auto part = [&](int64_t slot, int32_t side) { return all + width * slot + 1 + side * (depth + 1); };
  std::vector<int64_t> drafts(longest);
  std::vector<float> scores(longest);
  Rows rows(slots, tokens, length, longest);
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
      if (tries[young].tokens() >= room) {
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
    const int64_t found =
        tries[1 - young].propose(part(slot, 1 - young), longest, speculation, drafts.data(), scores.data(), older);
    if (older > newer) {
      rows.put(row, drafts, scores, found);
    }
  }
  return rows.result();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> suffix_tree(
    const Tensor& nodes, const Tensor& which, const Tensor& suffixes, int64_t longest) {
  const Tensor tries = side_by_side(which), own_suffixes = side_by_side(suffixes);
  const int64_t rows = which.size(0), capacity = nodes.size(2), depth = suffixes.size(1) - 1;
  Tensor tokens = torch::stable::new_zeros(which, {rows, longest}),
         parents = torch::stable::new_zeros(which, {rows, longest}), count = torch::stable::new_zeros(which, {rows}),
         scores = torch::stable::new_zeros(which, {rows, longest}, ScalarType::Float);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t trie = static_cast<int64_t*>(tries.data_ptr())[row];
    // Paths are read off the nodes alone.
    const Trie of(nullptr, table(nodes) + Trie::kFields * capacity * trie, capacity, nullptr, 0);
    static_cast<int64_t*>(count.data_ptr())[row] = of.propose_tree(
        table(own_suffixes) + (depth + 1) * row, depth, longest,
        static_cast<int64_t*>(tokens.data_ptr()) + row * longest,
        static_cast<int64_t*>(parents.data_ptr()) + row * longest,
        static_cast<float*>(scores.data_ptr()) + row * longest);
  }
  return {tokens, parents, count, scores};
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("suffix_tree", TORCH_BOX(&suffix_tree));
  m.impl("suffix_draft_", TORCH_BOX(&suffix_draft));
  m.impl("suffix_given_", TORCH_BOX(&suffix_given));
  m.impl("suffix_earlier_", TORCH_BOX(&suffix_earlier));
}

}  // namespace
}  // namespace speccompile
