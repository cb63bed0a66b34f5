// Linears over column-packed weights, see linear.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Columns of a packed weight's block, and of a tile.
constexpr int64_t kColumns = 32;

enum class Type { Float, BFloat16, Half };

// Output blocks [first, last) of y[rows, features] = x[rows, depth] * packed[ceil(features / 32), depth, 32].
// x and y are float32.
void linear_blocks(
    Type type, const float* x, int64_t rows, int64_t depth, const void* packed, float* y, int64_t features, int64_t first, int64_t last);

}  // namespace speccompile
