// y = x * w^T over a weight packed as [features / 32, depth, 32]: 32 outputs side by side, so that each weight is
// read once, in order, for all rows of a step. Whether one row or eight, the time is that of reading the weights.
#include "linear.h"

#include "tile.h"

namespace speccompile {
namespace {

// So much of a block, 32 KiB in float32, stays in the first-level cache while all rows pass. Its sums are added up apart,
// which also keeps rounding errors small.
constexpr int64_t kMostDepth = 256;

template <typename T>
void blocks(
    const float* x, int64_t rows, int64_t depth, const T* packed, float* y, int64_t features,
    int64_t first, int64_t last) {
  // A last block with fewer columns than 32 goes through its own tile.
  alignas(64) float whole[kMostRows * kColumns];
  // Parts of about one size: each fetches what follows, as much as it is itself.
  const int64_t parts = (depth + kMostDepth - 1) / kMostDepth, each = (depth + parts - 1) / parts;
  // Where a thread's part ends, its next one usually begins.
  const T* const end = packed + (features + kColumns - 1) / kColumns * depth * kColumns;
  for (int64_t block = first; block < last; ++block) {
    const T* weights = packed + block * depth * kColumns;
    const int64_t column = block * kColumns;
    const int64_t columns = std::min(kColumns, features - column);
    if (columns == kColumns) {
      for (int64_t start = 0; start < depth; start += each) {
        const int64_t count = std::min(each, depth - start);
        const T* const next = weights + (start + count) * kColumns;
        product<T>(
            rows, x + start, depth, weights + start * kColumns, kColumns, count, y + column, features, start > 0,
            next + count * kColumns <= end ? next : nullptr);
      }
    } else {
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const int64_t count = std::min<int64_t>(kMostRows, rows - row);
        for (int64_t start = 0; start < depth; start += each) {
          product<T>(
              count, x + row * depth + start, depth, weights + start * kColumns, kColumns,
              std::min(each, depth - start), whole, kColumns, start > 0);
        }
        for (int64_t i = 0; i < count; ++i) {
          std::copy_n(whole + i * kColumns, columns, y + (row + i) * features + column);
        }
      }
    }
  }
}

}  // namespace

void linear_blocks(
    Type type, const float* x, int64_t rows, int64_t depth, const void* packed, float* y, int64_t features, int64_t first, int64_t last) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    blocks<T>(
        x, rows, depth, static_cast<const T*>(packed), y, features, first, last);
  });
}

}  // namespace speccompile
