// y = x * w^T + b, both rounded to eight bits in groups of 64 along the inputs. A group's sum is one of integers, so it
// is exact; groups are added up in order. So a row's result has the same bits whatever is computed beside it.
#include "int8.h"

#include "tile.h"

#include <cmath>
#include <cstring>
#include <limits>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace speccompile {
namespace {

// Steps of four inputs, which is what one instruction multiplies and adds.
constexpr int64_t kSteps = kGroup / 4;
constexpr int64_t kGroupBytes = kSteps * kColumns * 4;

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

constexpr int kRows = 8;

template <int ROWS, bool FETCH>
void tile8(
    const int8_t* q, const float* q_scales, int64_t groups, const int8_t* packed, const float* scales, float* y,
    int64_t y_stride, const int8_t* next) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    sums[row][0] = sums[row][1] = _mm512_setzero_ps();
  }
  // The instruction takes unsigned inputs: 128 is added to them, and its share of each sum is taken off again.
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t group = 0; group < groups; ++group) {
    __m512i whole[ROWS][2], share[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      whole[row][0] = whole[row][1] = _mm512_setzero_si512();
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      const int8_t* weights = packed + group * kGroupBytes + step * kColumns * 4;
      const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 64);
      if constexpr (FETCH) {
        const char* ahead = reinterpret_cast<const char*>(next + group * kGroupBytes + step * kColumns * 4);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + 64);
      }
      share[0] = _mm512_dpbusd_epi32(share[0], shift, low);
      share[1] = _mm512_dpbusd_epi32(share[1], shift, high);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        int32_t four;
        std::memcpy(&four, q + (row * groups + group) * kGroup + step * 4, 4);
        const __m512i inputs = _mm512_xor_si512(_mm512_set1_epi32(four), shift);
        whole[row][0] = _mm512_dpbusd_epi32(whole[row][0], inputs, low);
        whole[row][1] = _mm512_dpbusd_epi32(whole[row][1], inputs, high);
      }
    }
    const __m512 low = _mm512_loadu_ps(scales + group * kColumns);
    const __m512 high = _mm512_loadu_ps(scales + group * kColumns + 16);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const __m512 own = _mm512_set1_ps(q_scales[row * groups + group]);
      const __m512 first = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole[row][0], share[0]));
      const __m512 second = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole[row][1], share[1]));
      sums[row][0] = _mm512_fmadd_ps(first, _mm512_mul_ps(own, low), sums[row][0]);
      sums[row][1] = _mm512_fmadd_ps(second, _mm512_mul_ps(own, high), sums[row][1]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(y + row * y_stride, sums[row][0]);
    _mm512_storeu_ps(y + row * y_stride + 16, sums[row][1]);
  }
}

template <int ROWS>
void tile8_of(
    int64_t rows, const int8_t* q, const float* q_scales, int64_t groups, const int8_t* packed, const float* scales,
    float* y, int64_t y_stride, const int8_t* next) {
  if (rows == ROWS) {
    if (next != nullptr) {
      tile8<ROWS, true>(q, q_scales, groups, packed, scales, y, y_stride, next);
    } else {
      tile8<ROWS, false>(q, q_scales, groups, packed, scales, y, y_stride, next);
    }
  } else if constexpr (ROWS > 1) {
    tile8_of<ROWS - 1>(rows, q, q_scales, groups, packed, scales, y, y_stride, next);
  }
}

#else

constexpr int kRows = 1;

template <int ROWS>
void tile8_of(
    int64_t, const int8_t* q, const float* q_scales, int64_t groups, const int8_t* packed, const float* scales,
    float* y, int64_t, const int8_t*) {
  float sums[kColumns] = {};
  for (int64_t group = 0; group < groups; ++group) {
    int32_t whole[kColumns] = {};
    for (int64_t step = 0; step < kSteps; ++step) {
      const int8_t* inputs = q + group * kGroup + step * 4;
      const int8_t* weights = packed + group * kGroupBytes + step * kColumns * 4;
      for (int64_t column = 0; column < kColumns; ++column) {
        for (int64_t i = 0; i < 4; ++i) {
          whole[column] += static_cast<int32_t>(inputs[i]) * static_cast<int32_t>(weights[column * 4 + i]);
        }
      }
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      sums[column] += static_cast<float>(whole[column]) * (q_scales[group] * scales[group * kColumns + column]);
    }
  }
  std::copy_n(sums, kColumns, y);
}

#endif

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
  const int64_t bytes = groups * kGroupBytes, tiles = (rows + kRows - 1) / kRows, each = (rows + tiles - 1) / tiles;
  alignas(64) float partial[kRows * kColumns];
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kColumns, columns = std::min(kColumns, features - column);
    for (int64_t row = 0; row < rows; row += each) {
      const int64_t count = std::min(each, rows - row);
      const bool whole = columns == kColumns;
      float* to = whole ? y + row * features + column : partial;
      const int64_t stride = whole ? features : kColumns;
      const bool fetch = row + each >= rows && block + 1 < last;
      tile8_of<kRows>(
          count, q + row * groups * kGroup, q_scales + row * groups, groups, packed + block * bytes,
          scales + block * groups * kColumns, to, stride, fetch ? packed + (block + 1) * bytes : nullptr);
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
