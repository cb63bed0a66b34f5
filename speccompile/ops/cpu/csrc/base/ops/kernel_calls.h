// The kernel calls of a recorded step. An op checks its tensors, makes its results, and hands one call of its kernel to
// `run_kernel`, with addresses and sizes by value. Replaying a step repeats these calls alone: recording.cpp.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "../kernels/ahead.h"
#include "share.h"

namespace speccompile {

// Memory that a call reads first.
struct Early {
  const void* from = nullptr;
  int64_t bytes = 0;
};

using Earlies = std::array<Early, 3>;

// A call that is kept. The weights that a step reads drive everything else out of the caches, also the calls. While one
// thread waits for a call's addresses and for a norm, the others wait for it: so `fetch` fetches these during the call before.
class alignas(kCacheLine) KernelCall {
 public:
  template <typename Call>
  KernelCall(Call call, const Earlies& early)
      : call_(std::make_unique<Kept<Call>>(std::move(call))), bytes_(sizeof(Kept<Call>)), early_(early) {}

  void operator()() const { call_->run(); }

  void fetch() const {
    fetch_lines(call_.get(), bytes_);
    for (const Early& each : early_) {
      fetch_lines(each.from, each.bytes);
    }
  }

 private:
  struct AnyCall {
    virtual ~AnyCall() = default;
    virtual void run() = 0;
  };

  template <typename Call>
  struct Kept final : AnyCall {
    explicit Kept(Call call) : call(std::move(call)) {}
    void run() override { call(); }
    Call call;
  };

  std::unique_ptr<AnyCall> call_;
  int64_t bytes_;
  Earlies early_;
};

using KernelCalls = std::vector<KernelCall>;

// Where calls of the calling thread are kept; null while it records no step.
SPECCOMPILE_CONSTINIT SPECCOMPILE_SHARED extern thread_local KernelCalls* kernel_calls;

// Runs `call`, and keeps it if the thread records a step. It owns no tensors of the step, whose memory would then not
// be used again.
//
// `repeatable`: its addresses are those of the op's arguments and results. An op that works on a copy of an argument says
// no: a replay would read the old copy. A step calls such an op again, by way of torch.
template <typename Call>
void run_kernel(Call call, bool repeatable = true, const Earlies& early = {}) {
  call();
  if (repeatable && kernel_calls) {
    kernel_calls->emplace_back(std::move(call), early);
  }
}

}  // namespace speccompile
