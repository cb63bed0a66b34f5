// Acceptance and commit of one row, see commit.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// What a step writes of a row, in its slot.
struct RowState {
  int64_t* tokens;
  int64_t* length;
  bool* alive;
  int64_t *emitted, *accepted, *proposed;
};

// What a step found for a row.
struct RowOutcome {
  const int64_t* target;  // [width], -1 where there is none
  int64_t width;
  int64_t offered, accepted;
  bool acts;
};

// How many `drafts`, of `offered` ones, are the target's tokens before the first that is not.
int64_t count_agreeing(const int64_t* drafts, const int64_t* target, int64_t drafted, int64_t offered);

void commit_row(const RowState& state, int64_t limit, const int64_t* eos, int64_t ends, const RowOutcome& outcome);

}  // namespace speccompile
