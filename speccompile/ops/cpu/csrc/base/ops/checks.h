// Checks of sizes and indices that several ops make.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace speccompile {

inline void check_fit(bool fits, const char* op) {
  STD_TORCH_CHECK(fits, "speccompile::", op, ": the sizes do not fit");
}

inline int64_t checked_index(int64_t index, int64_t size, const char* op) {
  STD_TORCH_CHECK(index >= 0 && index < size, "speccompile::", op, ": index ", index, " is out of range, size ", size);
  return index;
}

}  // namespace speccompile
