// y = x * w^T + b, both rounded to eight bits in groups of 64 along the inputs. A group's sum is one of integers, so it
// is exact; groups are added up in order. So a row's result has the same bits whatever is computed beside it.
#include "int8.h"

#include <algorithm>
#include <cmath>

// What the compiler may use says less than what torch's vectors are built for: Inductor asks for all that this CPU has.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
#include "int8_avx512.h"
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include "int8_avx2.h"
#else
#include "int8_plain.h"
#endif

namespace speccompile {
namespace {

// Tiles of a row or two are passes that share what is fetched, for more rows than these.
constexpr int kLines = kRows > kFewRows ? kColumns * 4 / kCacheLine : 1;

template <int ROWS>
void tile8_of(
    int64_t rows, const Inputs* inputs, const float* input_scales, int64_t groups, const int8_t* packed,
    const float* scales, float* y, int64_t y_stride, Ahead ahead) {
  if (rows == ROWS) {
    ahead.with_lines<kLines>([&](auto lines) {
      tile8<ROWS, decltype(lines)::value>(inputs, input_scales, groups, packed, scales, y, y_stride, ahead);
    });
  } else if constexpr (ROWS > 1) {
    tile8_of<ROWS - 1>(rows, inputs, input_scales, groups, packed, scales, y, y_stride, ahead);
  }
}

// The greatest size among them: NaN where one is NaN, for a row that has one must not look like a number.
float greatest_size(const float* values) {
  Vec greatest(0.0f);
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    greatest = at::vec::maximum(greatest, Vec::loadu(values + i).abs());
  }
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, greatest);
}

}  // namespace

int64_t input_bytes(int64_t groups) {
  return groups * static_cast<int64_t>(sizeof(Inputs));
}

void quantise(const float* x, int64_t depth, int64_t groups, uint8_t* inputs, float* scales) {
  auto* to = reinterpret_cast<Inputs*>(inputs);
  for (int64_t group = 0; group < groups; ++group) {
    const float* values = x + group * kGroup;
    alignas(64) float padded[kGroup];
    if (const int64_t count = depth - group * kGroup; count < kGroup) {
      std::fill(std::copy_n(values, count, padded), padded + kGroup, 0.0f);
      values = padded;
    }
    const float most = greatest_size(values), factor = 127.0f / most;
    scales[group] = most / 127.0f;
    if (std::isfinite(most) && std::isfinite(factor)) {
      to[group].set(values, factor);
    } else {
      // Zeros, what is not a number, and what is so small that 127 / most is infinite: all are zeros, times the scale.
      std::fill_n(padded, kGroup, 0.0f);
      to[group].set(padded, 0.0f);
    }
  }
}

void int8_blocks(
    const uint8_t* inputs, const float* input_scales, int64_t rows, int64_t groups, const int8_t* packed,
    const float* scales, const float* bias, float* y, int64_t features, int64_t first, int64_t last) {
  if (rows == 0) {
    return;
  }
  const int64_t bytes = groups * kGroupBytes, tiles = (rows + kRows - 1) / kRows, each = (rows + tiles - 1) / tiles;
  alignas(64) float partial[kRows * kColumns];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, features - column);
    // Where a thread's part ends, its next one usually begins.
    const int8_t* next = column + columns < features ? packed + (block + 1) * bytes : nullptr;
    for (int64_t row = 0, pass = 0; row < rows; row += each, ++pass) {
      const int64_t count = std::min(each, rows - row);
      const bool whole = columns == kColumns;
      float* to = whole ? y + row * features + column : partial;
      const int64_t stride = whole ? features : kColumns;
      tile8_of<kRows>(
          count, reinterpret_cast<const Inputs*>(inputs) + row * groups, input_scales + row * groups, groups,
          packed + block * bytes, scales + block * groups * kColumns, to, stride,
          Ahead::share(rows, next, groups * kSteps, kColumns * 4, pass, tiles));
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
