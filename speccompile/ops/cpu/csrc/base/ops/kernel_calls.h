// The kernel calls of a recorded step. An op checks its tensors, makes its results, and hands one call of its kernel to
// `run_kernel`, with addresses and sizes by value. Replaying a step repeats these calls alone: recording.cpp.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "share.h"

namespace speccompile {

using KernelCalls = std::vector<std::function<void()>>;

// Where calls of the calling thread are kept; null while it records no step.
SPECCOMPILE_CONSTINIT SPECCOMPILE_SHARED extern thread_local KernelCalls* kernel_calls;

// Runs `call`, and keeps it if the thread records a step. It owns no tensors of the step, whose memory would then not
// be used again.
//
// `repeatable`: its addresses are those of the op's arguments and results. An op that works on a copy of an argument says
// no: a replay would read the old copy. A step calls such an op again, by way of torch.
template <typename Call>
void run_kernel(Call call, bool repeatable = true) {
  call();
  if (repeatable && kernel_calls) {
    kernel_calls->emplace_back(std::move(call));
  }
}

}  // namespace speccompile
