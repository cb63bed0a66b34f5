// What is multiplied next is fetched from memory while the present weights are multiplied. Each pass over these fetches
// its share of it: memory would rest in the others, and one alone would wait for it. It goes to the second-level cache:
// in the first it would drive out what is read again for the next rows.
#pragma once

#include <cstdint>
#include <type_traits>

namespace speccompile {

constexpr int64_t kCacheLine = 64;
// So few leave the core waiting for memory, and the hardware fetches ahead by itself, faster. Two rows are enough work that
// it falls behind: a cold linear of two took longer than one of four.
constexpr int64_t kFewRows = 1;

inline void fetch_lines(const void* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(from) + byte);
  }
}

inline void fetch_lines_to_write(const void* to, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(to) + byte, 1);
  }
}

struct Ahead {
  const char* from = nullptr;
  // Bytes for each step of a pass's loop.
  int64_t each = 0;

  static Ahead share(int64_t rows, const void* next, int64_t steps, int64_t each, int64_t pass, int64_t passes) {
    if (next == nullptr || rows <= kFewRows) {
      return {};
    }
    return {static_cast<const char*>(next) + steps * each * pass / passes, (each + passes - 1) / passes};
  }

  // How many lines a step fetches is known to the compiler: none costs nothing. LINES are those of a step's own weights;
  // many passes fetch one at most.
  template <int LINES, typename Run>
  void with_lines(Run run) const {
    if (from == nullptr) {
      run(std::integral_constant<int, 0>());
    } else if (each < kCacheLine) {
      run(std::integral_constant<int, 1>());
    } else {
      run(std::integral_constant<int, LINES>());
    }
  }

  template <int LINES>
  inline void fetch(int64_t step) const {
    if constexpr (LINES > 0) {
      __builtin_prefetch(from + step * each, 0, 2);
    }
    if constexpr (LINES > 1) {
      __builtin_prefetch(from + step * each + kCacheLine, 0, 2);
    }
  }
};

}  // namespace speccompile
