// Squares of numbers turned over in registers: the loops of torch's own transposition are not unrolled, and go through
// memory between its stages.
#pragma once

#include "tile.h"

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

#include <cstdint>

namespace speccompile {
namespace {

// Rows and columns of a square.
constexpr int64_t kSide = 16;

#if defined(CPU_CAPABILITY_AVX512)

inline __m512 several(const float* from) {
  return _mm512_loadu_ps(from);
}

inline __m512 several(const c10::Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512 several(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 several(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline __m512 scaled(__m512 values, const c10::Half* scale) {
  return _mm512_mul_ps(values, _mm512_cvtph_ps(_mm256_set1_epi16(*reinterpret_cast<const int16_t*>(scale))));
}

inline void put(__m512 values, float* to) {
  _mm512_storeu_ps(to, values);
}

// to[j * to_stride + i] = square(i, j), for i and j below kSide. `square.vector(i, j)` has as many columns as `several` reads.
template <typename Source>
[[gnu::always_inline]] inline void turn_square(const Source& square, float* to, int64_t to_stride) {
  const auto doubles = [](__m512 row) { return _mm512_castps_pd(row); };
  const auto floats = [](__m512d row) { return _mm512_castpd_ps(row); };
  __m512 rows[16], others[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    rows[i] = square.vector(i, 0);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    others[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    others[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = floats(_mm512_unpacklo_pd(doubles(others[i]), doubles(others[i + 2])));
    rows[i + 1] = floats(_mm512_unpackhi_pd(doubles(others[i]), doubles(others[i + 2])));
    rows[i + 2] = floats(_mm512_unpacklo_pd(doubles(others[i + 1]), doubles(others[i + 3])));
    rows[i + 3] = floats(_mm512_unpackhi_pd(doubles(others[i + 1]), doubles(others[i + 3])));
  }
  // Each quarter of a row is done by now; quarters change places.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int at = i / 4 * 8 + i % 4;
    others[at] = _mm512_shuffle_f32x4(rows[at], rows[at + 4], 0x88);
    others[at + 4] = _mm512_shuffle_f32x4(rows[at], rows[at + 4], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_ps(to + i * to_stride, _mm512_shuffle_f32x4(others[i], others[i + 8], 0x88));
    _mm512_storeu_ps(to + (i + 8) * to_stride, _mm512_shuffle_f32x4(others[i], others[i + 8], 0xdd));
  }
}

#elif defined(CPU_CAPABILITY_AVX2)

inline __m256 several(const float* from) {
  return _mm256_loadu_ps(from);
}

inline __m256 several(const c10::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline __m256 several(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256 several(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

inline __m256 scaled(__m256 values, const c10::Half* scale) {
  return _mm256_mul_ps(values, _mm256_cvtph_ps(_mm_set1_epi16(*reinterpret_cast<const int16_t*>(scale))));
}

inline void put(__m256 values, float* to) {
  _mm256_storeu_ps(to, values);
}

// A quarter of a square.
template <typename Source>
[[gnu::always_inline]] inline void turn_quarter(
    const Source& square, int64_t row, int64_t column, float* to, int64_t to_stride) {
  __m256 rows[8], others[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = square.vector(row + i, column);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    others[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    others[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    rows[i] = _mm256_shuffle_ps(others[i], others[i + 2], 0x44);
    rows[i + 1] = _mm256_shuffle_ps(others[i], others[i + 2], 0xee);
    rows[i + 2] = _mm256_shuffle_ps(others[i + 1], others[i + 3], 0x44);
    rows[i + 3] = _mm256_shuffle_ps(others[i + 1], others[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
  }
}

template <typename Source>
[[gnu::always_inline]] inline void turn_square(const Source& square, float* to, int64_t to_stride) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < kSide; i += 8) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < kSide; j += 8) {
      turn_quarter(square, i, j, to + j * to_stride + i, to_stride);
    }
  }
}

#else

template <typename T>
inline float several(const T* from) {
  return static_cast<float>(*from);
}

inline float scaled(float value, const c10::Half* scale) {
  return value * static_cast<float>(*scale);
}

inline void put(float value, float* to) {
  *to = value;
}

template <typename Source>
inline void turn_square(const Source& square, float* to, int64_t to_stride) {
  for (int64_t i = 0; i < kSide; ++i) {
    for (int64_t j = 0; j < kSide; ++j) {
      to[j * to_stride + i] = square.vector(i, j);
    }
  }
}

#endif

// A square of a matrix, as turn_square reads it.
template <typename T>
struct Square {
  const T* from;
  int64_t stride;

  auto vector(int64_t row, int64_t column) const { return several(from + row * stride + column); }
};

}  // namespace
}  // namespace speccompile
