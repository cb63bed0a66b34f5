// y = x * w^T + b, both rounded to eight bits in groups of 64 along the inputs. A group's sum is one of integers, so it
// is exact; groups are added up in order. So a row's result has the same bits whatever is computed beside it.
#include "int8.h"

#include <algorithm>
#include <cmath>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include "int8_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "int8_avx2.h"
#else
#include "int8_plain.h"
#endif

namespace speccompile {
namespace {

template <int ROWS>
void tile8_of(
    int64_t rows, const int8_t* q, const float* q_scales, int64_t groups, const int8_t* packed, const float* scales,
    float* y, int64_t y_stride, Ahead ahead) {
  if (rows == ROWS) {
    ahead.with_lines([&](auto lines) {
      tile8<ROWS, decltype(lines)::value>(q, q_scales, groups, packed, scales, y, y_stride, ahead);
    });
  } else if constexpr (ROWS > 1) {
    tile8_of<ROWS - 1>(rows, q, q_scales, groups, packed, scales, y, y_stride, ahead);
  }
}

}  // namespace

void quantise(const float* x, int64_t depth, int64_t groups, int8_t* q, float* scales) {
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t start = group * kGroup, count = std::min(kGroup, depth - start);
    float most = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      // NaN is kept: a row that has one must not look like a number.
      most = std::fabs(x[start + i]) > most || std::isnan(x[start + i]) ? std::fabs(x[start + i]) : most;
    }
    scales[group] = most / 127.0f;
    const float factor = most > 0.0f && std::isfinite(most) ? 127.0f / most : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      q[start + i] = static_cast<int8_t>(std::nearbyint(x[start + i] * factor));
    }
    std::fill(q + start + count, q + start + kGroup, static_cast<int8_t>(0));
  }
}

void int8_blocks(
    const int8_t* q, const float* q_scales, int64_t rows, int64_t groups, const int8_t* packed, const float* scales,
    const float* bias, float* y, int64_t features, int64_t first, int64_t last) {
  if (rows == 0) {
    return;
  }
  const int64_t bytes = groups * kGroupBytes, tiles = (rows + kRows - 1) / kRows, each = (rows + tiles - 1) / tiles;
  alignas(64) float partial[kRows * kColumns];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, features - column);
    const int8_t* next = block + 1 < last ? packed + (block + 1) * bytes : nullptr;
    for (int64_t row = 0, pass = 0; row < rows; row += each, ++pass) {
      const int64_t count = std::min(each, rows - row);
      const bool whole = columns == kColumns;
      float* to = whole ? y + row * features + column : partial;
      const int64_t stride = whole ? features : kColumns;
      tile8_of<kRows>(
          count, q + row * groups * kGroup, q_scales + row * groups, groups, packed + block * bytes,
          scales + block * groups * kColumns, to, stride,
          Ahead::share(next, groups * kSteps, kColumns * 4, pass, tiles));
      for (int64_t i = 0; i < count; ++i) {
        float* out = y + (row + i) * features + column;
        if (!whole) {
          std::copy_n(partial + i * kColumns, columns, out);
        }
        for (int64_t j = 0; bias != nullptr && j < columns; ++j) {
          out[j] += bias[column + j];
        }
      }
    }
  }
}

}  // namespace speccompile
