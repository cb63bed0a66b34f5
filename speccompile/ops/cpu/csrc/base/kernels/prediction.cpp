// speccompile.ops.prediction, row by row. A row without a prediction costs nothing.
#include "prediction.h"

#include <algorithm>
#include <cstdlib>

namespace speccompile {

namespace {

// As speccompile/ops/prediction.py has it.
constexpr int64_t kLongestMatch = 8;

int64_t matched_before(const PredictedRow& row, int64_t end) {
  const int64_t most = std::min({kLongestMatch, row.count, end});
  int64_t matched = 0;
  while (matched < most && row.prediction[end - 1 - matched] == row.tokens[row.count - 1 - matched]) {
    ++matched;
  }
  return end == row.count && matched == row.count ? kLongestMatch : matched;
}

}  // namespace

int64_t match_prediction(const PredictedRow& row, int64_t longest, int64_t* drafts, float* chances) {
  int64_t best = 0, place = 0;
  for (int64_t end = 0; end < row.predicted; ++end) {
    const int64_t matched = matched_before(row, end);
    // Of two that are as near the later one.
    if (matched > best || (matched == best && std::abs(end - row.count) <= std::abs(place - row.count))) {
      best = matched;
      place = end;
    }
  }
  if (best == 0) {
    return 0;
  }
  const int64_t found = std::min(longest, row.predicted - place);
  const double chance = static_cast<double>(best) / (static_cast<double>(best) + 1.0);
  double all = 1.0;
  for (int64_t i = 0; i < found; ++i) {
    drafts[i] = row.prediction[place + i];
    all *= chance;
    chances[i] = static_cast<float>(all);
  }
  return found;
}

}  // namespace speccompile
