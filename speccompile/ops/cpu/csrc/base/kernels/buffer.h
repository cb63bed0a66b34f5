// Memory of one thread that is kept between calls, since a step makes many. It begins at a cache line: vectors that lie
// across two lines take twice as long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace speccompile {

class Buffer {
 public:
  // Room for `size` floats. What was in it is lost when it grows.
  float* at_least(int64_t size) {
    if (size > size_) {
      floats_.reset();
      floats_.reset(static_cast<float*>(::operator new(size * sizeof(float), kLine)));
      size_ = size;
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};

  struct Free {
    void operator()(float* floats) const { ::operator delete(floats, kLine); }
  };

  std::unique_ptr<float, Free> floats_;
  int64_t size_ = 0;
};

}  // namespace speccompile
