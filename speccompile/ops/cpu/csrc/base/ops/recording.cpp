// Recorded steps: speccompile/lowering/recorded_step.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "kernel_calls.h"

namespace speccompile {

SPECCOMPILE_CONSTINIT thread_local KernelCalls* kernel_calls = nullptr;

// share.cpp
SPECCOMPILE_EXPORT void speccompile_enter_pool(int64_t tokens, bool* changed);
SPECCOMPILE_EXPORT void speccompile_leave_pool(bool* changed);

namespace {

constexpr size_t kAlignment = 64;

// Blocks for the tensors of recordings that are never replayed at once. A tensor that ends gives its block to a later
// tensor: as a replay makes the same calls in the same order, and computes all that it reads from the arguments of its
// step, no block has two values that are needed at once.
class StepMemory {
 public:
  ~StepMemory() {
    for (const auto& [size, block] : unused_) {
      std::free(block);
    }
  }

  void* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = unused_.lower_bound(size);
    // A block of twice the size is left for a tensor that needs it.
    if (found != unused_.end() && found->first <= 2 * size) {
      void* const block = found->second;
      sizes_[block] = found->first;
      unused_.erase(found);
      return block;
    }
    void* const block = std::aligned_alloc(kAlignment, size);
    if (block == nullptr) {
      throw std::bad_alloc();
    }
    sizes_[block] = size;
    bytes_ += size;
    return block;
  }

  void give_back(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(block);
    unused_.emplace(found->second, block);
    sizes_.erase(found);
  }

  int64_t bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, void*> unused_;
  std::map<void*, size_t> sizes_;
  int64_t bytes_ = 0;
};

// A block in use keeps its memory alive.
struct StepBlock {
  std::shared_ptr<StepMemory> memory;
  void* data;
};

void free_step_block(void* context) {
  const auto block = std::unique_ptr<StepBlock>(static_cast<StepBlock*>(context));
  block->memory->give_back(block->data);
}

thread_local std::shared_ptr<StepMemory> step_memory;

// torch's allocator, but for threads that record a step.
class StepAllocator final : public c10::Allocator {
 public:
  explicit StepAllocator(c10::Allocator* other) : other_(other) {}

  c10::DataPtr allocate(size_t size) override {
    if (!step_memory || size == 0) {
      return other_->allocate(size);
    }
    const size_t whole = (size + kAlignment - 1) / kAlignment * kAlignment;
    auto block = std::make_unique<StepBlock>(StepBlock{step_memory, step_memory->take(whole)});
    void* const data = block->data;
    return {data, block.release(), &free_step_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return other_->raw_deleter();
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    other_->copy_data(to, from, size);
  }

 private:
  c10::Allocator* other_;
};

// Whether torch uses the allocator: a program may have installed one of its own.
bool install_allocator() {
  static StepAllocator* const installed = [] {
    auto* const made = new StepAllocator(c10::GetCPUAllocator());
    // Greater than torch's own priority.
    c10::SetCPUAllocator(made, 1);
    return made;
  }();
  return c10::GetCPUAllocator() == installed;
}

struct Recording {
  std::shared_ptr<StepMemory> memory;
  KernelCalls calls;
  std::string fault;
};

}  // namespace

// Null if results of ops would not lie in it.
SPECCOMPILE_EXPORT void* speccompile_new_memory() {
  return install_allocator() ? new std::shared_ptr<StepMemory>(std::make_shared<StepMemory>()) : nullptr;
}

SPECCOMPILE_EXPORT void speccompile_delete_memory(void* memory) {
  delete static_cast<std::shared_ptr<StepMemory>*>(memory);
}

SPECCOMPILE_EXPORT int64_t speccompile_memory_bytes(void* memory) {
  return (*static_cast<std::shared_ptr<StepMemory>*>(memory))->bytes();
}

SPECCOMPILE_EXPORT void* speccompile_new_recording(void* memory) {
  return new Recording{*static_cast<std::shared_ptr<StepMemory>*>(memory), {}, {}};
}

SPECCOMPILE_EXPORT void speccompile_delete_recording(void* recording) {
  delete static_cast<Recording*>(recording);
}

// Until `speccompile_stop_recording`, the calling thread's tensors lie in the recording's memory, and its kernel calls
// are kept.
SPECCOMPILE_EXPORT void speccompile_start_recording(void* recording) {
  auto* const to = static_cast<Recording*>(recording);
  step_memory = to->memory;
  kernel_calls = &to->calls;
}

SPECCOMPILE_EXPORT void speccompile_stop_recording() {
  kernel_calls = nullptr;
  step_memory.reset();
}

SPECCOMPILE_EXPORT int64_t speccompile_recorded_calls(void* recording) {
  return static_cast<int64_t>(static_cast<Recording*>(recording)->calls.size());
}

// Forgets all calls but the first `count`.
SPECCOMPILE_EXPORT void speccompile_keep_calls(void* recording, int64_t count) {
  KernelCalls& calls = static_cast<Recording*>(recording)->calls;
  calls.erase(calls.begin() + count, calls.end());
}

// Repeats the kernel calls [first, last), in the pool if `tokens` is not negative (speccompile_enter_pool). Returns null,
// or the message of what a kernel has thrown.
SPECCOMPILE_EXPORT const char* speccompile_replay(void* recording, int64_t first, int64_t last, int64_t tokens) {
  auto* const from = static_cast<Recording*>(recording);
  bool entered = false, left = false, failed = false;
  if (tokens >= 0) {
    speccompile_enter_pool(tokens, &entered);
  }
  try {
    const KernelCalls& calls = from->calls;
    for (int64_t i = first; i < last; ++i) {
      if (i + 1 < last) {
        calls[i + 1].fetch();
        fetch_lines(&calls[i + 1] + 1, sizeof(KernelCall));
      }
      calls[i]();
    }
  } catch (const std::exception& error) {
    from->fault = error.what();
    failed = true;
  }
  if (entered) {
    speccompile_leave_pool(&left);
  }
  return failed ? from->fault.c_str() : nullptr;
}

}  // namespace speccompile
