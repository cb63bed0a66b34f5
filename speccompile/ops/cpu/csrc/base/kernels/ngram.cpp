// speccompile.modes.ngram, over the live part of the text alone and from its end: the search is over at the first match
// of the longest suffix.
#include "ngram.h"

#include "tree.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace speccompile {

int64_t match_ngram(
    const int64_t* tokens, int64_t length, int64_t longest, int64_t shortest, int64_t* drafts, int64_t drafted) {
  const int64_t newest = length - 1;
  int64_t best = shortest - 1, found = -1;
  for (int64_t place = newest - 1; place >= 0 && best < longest; --place) {
    // A match that ends at `place` begins at 0 or after it.
    const int64_t most = std::min(longest, place + 1);
    int64_t matched = 0;
    while (matched < most && tokens[place - matched] == tokens[newest - matched]) {
      ++matched;
    }
    if (matched > best) {
      best = matched;
      found = place;
    }
  }
  const int64_t distance = found < 0 ? 1 : newest - found;
  for (int64_t i = 0; i < drafted; ++i) {
    drafts[i] = tokens[std::max<int64_t>(newest + 1 - distance + i % distance, 0)];
  }
  return found < 0 ? 0 : drafted;
}

int64_t ngram_tree(
    const int64_t* text, int64_t length, const NgramTree& how, int64_t* tokens, int64_t* parents, int64_t most) {
  struct Match {
    int64_t matched, place;
  };
  const int64_t newest = length - 1;
  std::vector<Match> found;
  for (int64_t place = newest - 1; place >= 0; --place) {
    const int64_t limit = std::min(how.longest, place + 1);
    int64_t matched = 0;
    while (matched < limit && text[place - matched] == text[newest - matched]) {
      ++matched;
    }
    if (matched >= how.shortest) {
      found.push_back({matched, place});
    }
  }
  // Stable: of equally long ones the most recent first.
  std::stable_sort(
      found.begin(), found.end(), [](const Match& one, const Match& other) { return one.matched > other.matched; });
  PathTree tree;
  double share = 1.0;
  for (size_t rank = 0; rank < std::min<size_t>(found.size(), how.matches); ++rank, share *= 0.5) {
    const int64_t distance = newest - found[rank].place;
    tree.begin();
    for (int64_t i = 0; i < most; ++i) {
      tree.add(text[newest + 1 - distance + i % distance], share * std::pow(how.continues, i + 1));
    }
  }
  return tree.finish(most, tokens, parents, nullptr);
}

}  // namespace speccompile
