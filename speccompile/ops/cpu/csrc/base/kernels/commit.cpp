// speccompile.passes.step.commit and greedy_accept.count_agreeing, row by row. Torch's own ops for the same are sixty calls
// a step, which take longer than a layer.
#include "commit.h"

#include <algorithm>

namespace speccompile {

int64_t count_agreeing(const int64_t* drafts, const int64_t* target, int64_t drafted, int64_t offered) {
  const int64_t most = std::min(drafted, offered);
  int64_t count = 0;
  while (count < most && drafts[count] == target[count]) {
    ++count;
  }
  return count;
}

void commit_row(const RowState& state, int64_t limit, const int64_t* eos, int64_t ends, const RowOutcome& outcome) {
  const int64_t length = *state.length, width = outcome.width, *target = outcome.target;
  int64_t count = std::min(outcome.accepted + 1, limit - length);
  int64_t first_end = 0;
  while (first_end < width && !(first_end < count && std::find(eos, eos + ends, target[first_end]) != eos + ends)) {
    ++first_end;
  }
  count = std::min(count, first_end + 1);
  const int64_t first_undecided = std::find_if(target, target + width, [](int64_t token) { return token < 0; }) - target;
  // A draft that is not a number spoils the places before it too: without drafts they may be sound.
  const bool undecided = first_undecided < count && outcome.offered == 0;
  count = outcome.acts ? std::min(count, first_undecided) : 0;

  for (int64_t place = 0; place < std::min(count, width); ++place) {
    state.tokens[length + place] = target[place];
  }
  *state.length = length + count;
  *state.alive = *state.alive && !(outcome.acts && (first_end < count || length + count >= limit || undecided));
  *state.emitted = count;
  *state.accepted = std::min(outcome.accepted, count);
  *state.proposed = outcome.acts ? outcome.offered : 0;
}

}  // namespace speccompile
