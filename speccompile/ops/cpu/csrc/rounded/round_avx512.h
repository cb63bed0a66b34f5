// A group of inputs rounded, by AVX512-VNNI.
#pragma once

#include "rounded.h"

#include <immintrin.h>

#include <cstdint>

namespace speccompile {
namespace {

// Writes `values` times `factor`, rounded, to `numbers`; returns the sums of their quarters.
inline __m128i round_group(const float* values, float factor, int8_t* numbers) {
  static_assert(kGroup == 64);
  const __m512 factors = _mm512_set1_ps(factor);
  const auto quarter = [&](int64_t i) {
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i * 16), factors)));
  };
  __m512i all = _mm512_castsi128_si512(quarter(0));
  all = _mm512_inserti32x4(all, quarter(1), 1);
  all = _mm512_inserti32x4(all, quarter(2), 2);
  all = _mm512_inserti32x4(all, quarter(3), 3);
  _mm512_storeu_si512(numbers, all);
  // Sums of four numbers, of eight, and in all places of a quarter of sixteen.
  __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), all);
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, sums));
}

}  // namespace
}  // namespace speccompile
