// Drafts from a predicted text, see prediction.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// A row's new tokens, and the text that was predicted for them.
struct PredictedRow {
  const int64_t* tokens;
  int64_t count;
  const int64_t* prediction;
  int64_t predicted;
};

// Writes the drafts, at most `longest`, and their chances; returns how many there are.
int64_t match_prediction(const PredictedRow& row, int64_t longest, int64_t* drafts, float* chances);

}  // namespace speccompile
