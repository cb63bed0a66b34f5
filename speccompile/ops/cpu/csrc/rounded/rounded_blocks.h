// Linears over rounded weights and inputs, whatever form the weights have.
//
// A form is a struct with
//   Inputs            a group of a row's rounded inputs, as the form's tile reads them: set(values, factor)
//   Number            of the packed weight
//   kRows             of a tile
//   kSteps, kStepBytes  a group of the packed weight: so many steps of a tile's loop, of so many bytes each
//   parts(groups, scale_rows)  all inputs of a row are so many parts, each with the same scales
//   tile<ROWS, LINES>(inputs, input_scales, groups, packed, parts, scale_rows, y, y_stride, ahead)
//   number(k, column, packed, minimums)  of a block: what is multiplied with its scale
//   kMinimums         whether scales may have minimums
#pragma once

#include "../base/kernels/ahead.h"
#include "rounded.h"
#include "scale_rows.h"
#include "../base/kernels/tile.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace speccompile {
namespace {

// The greatest size among them: NaN where one is NaN, for a row that has one must not look like a number.
inline float greatest_size(const float* values) {
  using Bits = at::vec::Vectorized<int32_t>;
  // Without their signs, numbers and their bits as integers have one order, and NaN comes last.
  Bits greatest(0);
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    greatest = at::vec::maximum(greatest, at::vec::cast<int32_t>(Vec::loadu(values + i).abs()));
  }
  return at::vec::vec_reduce_all<float>(
      [](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, at::vec::cast<float>(greatest));
}

// Row of x[depth] to inputs[groups], zeros after depth, and scales[groups]: x is about input * scale.
template <typename Inputs>
void round_inputs(const float* x, int64_t depth, int64_t groups, Inputs* inputs, float* scales) {
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
      inputs[group].set(values, factor);
    } else {
      // Zeros, what is not a number, and what is so small that 127 / most is infinite: all are zeros, times the scale.
      std::fill_n(padded, kGroup, 0.0f);
      inputs[group].set(padded, 0.0f);
    }
  }
}

template <typename Form, int ROWS>
void rounded_tile(
    int64_t rows, const typename Form::Inputs* inputs, const float* input_scales, int64_t groups,
    const typename Form::Number* packed, int64_t parts, const ScaleRows& scales, float* y, int64_t y_stride,
    Ahead ahead) {
  if (rows == ROWS) {
    // Tiles of one row are passes that share what is fetched, for more rows than these.
    constexpr int kLines = Form::kRows > kFewRows ? Form::kStepBytes / kCacheLine : 1;
    ahead.with_lines<kLines>([&](auto lines) {
      Form::template tile<ROWS, decltype(lines)::value>(
          inputs, input_scales, groups, packed, parts, scales, y, y_stride, ahead);
    });
  } else if constexpr (ROWS > 1) {
    rounded_tile<Form, ROWS - 1>(rows, inputs, input_scales, groups, packed, parts, scales, y, y_stride, ahead);
  }
}

// Output blocks [first, last) of y[rows, features] = x * w^T. A part's sum is one of integers, so it is exact.
// A group's is the sum of its parts' in order, each times its scale, less the part's inputs times its minimum; and y is
// that of the groups', each times the scale of its inputs: all of it fused multiply-adds. So a row's result has the same
// bits whatever is computed beside it, and on every CPU.
template <typename Form>
void rounded_blocks(
    const typename Form::Inputs* inputs, const float* input_scales, int64_t rows, int64_t groups,
    const typename Form::Number* packed, const Scales& scales, float* y, int64_t features,
    int64_t first, int64_t last) {
  if (rows == 0) {
    return;
  }
  constexpr int64_t kRows = Form::kRows;
  const int64_t bytes = groups * Form::kSteps * Form::kStepBytes, tiles = (rows + kRows - 1) / kRows,
                each = (rows + tiles - 1) / tiles;
  const int64_t parts = Form::parts(groups, scales.rows);
  alignas(64) float partial[kRows * kColumns];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, features - column);
    const ScaleRows scale_rows(scales, block, parts);
    // Where a thread's part ends, its next one usually begins.
    const auto* next = column + columns < features ? packed + (block + 1) * bytes : nullptr;
    for (int64_t row = 0, pass = 0; row < rows; row += each, ++pass) {
      const int64_t count = std::min(each, rows - row);
      const bool whole = columns == kColumns;
      float* to = whole ? y + row * features + column : partial;
      const int64_t stride = whole ? features : kColumns;
      rounded_tile<Form, kRows>(
          count, inputs + row * groups, input_scales + row * groups, groups, packed + block * bytes, parts, scale_rows,
          to, stride, Ahead::share(rows, next, groups * Form::kSteps, Form::kStepBytes, pass, tiles));
      for (int64_t i = 0; !whole && i < count; ++i) {
        std::copy_n(partial + i * kColumns, columns, y + (row + i) * features + column);
      }
    }
  }
}

template <typename Form>
void rounded_weight_row(
    int64_t row, int64_t depth, int64_t groups, const typename Form::Number* packed, const Scales& scales, float* to) {
  const int64_t block = row / kColumns, column = row % kColumns, parts = Form::parts(groups, scales.rows);
  const int64_t part = groups * kGroup / parts;
  packed += block * groups * Form::kSteps * Form::kStepBytes;
  ScaleRows rows(scales, block, parts);
  for (int64_t first = 0; first < depth; first += part, rows.next()) {
    const float scale = rows.scale(column), minimum = rows.minimums() ? rows.minimum(column) : 0.0f;
    for (int64_t k = first; k < std::min(first + part, depth); ++k) {
      // Rounded after each operation, as a format's own library computes it.
      const float scaled = static_cast<float>(Form::number(k, column, packed, rows.minimums())) * scale;
      to[k] = scaled - minimum;
    }
  }
}

template <typename Form>
constexpr RoundedForm rounded_form() {
  using Inputs = typename Form::Inputs;
  using Number = typename Form::Number;
  return {
      [](int64_t groups) { return groups * static_cast<int64_t>(sizeof(Inputs)); },
      [](const float* x, int64_t depth, int64_t groups, uint8_t* inputs, float* scales) {
        round_inputs(x, depth, groups, reinterpret_cast<Inputs*>(inputs), scales);
      },
      [](const uint8_t* inputs, const float* input_scales, int64_t rows, int64_t groups, const void* packed,
         const Scales& scales, float* y, int64_t features, int64_t first, int64_t last) {
        rounded_blocks<Form>(
            reinterpret_cast<const Inputs*>(inputs), input_scales, rows, groups, static_cast<const Number*>(packed),
            scales, y, features, first, last);
      },
      [](int64_t row, int64_t depth, int64_t groups, const void* packed, const Scales& scales, float* to) {
        rounded_weight_row<Form>(row, depth, groups, static_cast<const Number*>(packed), scales, to);
      },
      [](int64_t groups, int64_t rows) {
        const int64_t parts = rows > 0 ? Form::parts(groups, rows) : 0;
        return parts > 0 && parts % rows == 0;
      },
      Form::kMinimums,
  };
}

}  // namespace
}  // namespace speccompile
