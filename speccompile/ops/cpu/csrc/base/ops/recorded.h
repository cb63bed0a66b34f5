// What torch's dispatcher does for every op, for those that are called past it: they are recorded while a profiler runs.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Its header includes those of RecordFunction, which take the compiler longer than all of the ops.
namespace torch::profiler::impl {
bool profilerEnabled();
}

namespace speccompile {

class Recorded {
 public:
  explicit Recorded(const char* name) {
    if (torch::profiler::impl::profilerEnabled()) {
      TORCH_ERROR_CODE_CHECK(aoti_record_function_start(name, nullptr, nullptr, 0, &guard_));
    }
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  ~Recorded() {
    if (guard_) {
      aoti_record_function_end(guard_);
    }
  }

 private:
  AtenRecordFunctionHandle guard_ = nullptr;
};

}  // namespace speccompile
