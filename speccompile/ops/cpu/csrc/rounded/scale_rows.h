// The scales of a block's outputs, while a loop walks over its inputs.
#pragma once

#include "rounded.h"
#include "../base/kernels/tile.h"

#include <c10/util/Half.h>

#include <cstdint>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace speccompile {
namespace {

// Stands at a part of the inputs. All of a part's inputs have the same scales, and some parts in a row may, too.
class ScaleRows {
 public:
  // parts: of all inputs of a row.
  ScaleRows(const Scales& scales, int64_t block, int64_t parts)
      : kind_(scales.kind),
        minimums_(scales.minimums),
        steps_(scales.kind == ScaleKind::Steps ? scales.steps : 1),
        steps_left_(steps_),
        plane_(scales.kind == ScaleKind::Steps ? kUnits + steps_ * kColumns : kColumns * item()),
        shared_by_(parts / scales.rows),
        left_(shared_by_),
        units_(static_cast<const char*>(scales.values) + block * (scales.rows / steps_) * both()),
        at_(units_ + (scales.kind == ScaleKind::Steps ? kUnits : 0)) {}

  bool minimums() const { return minimums_; }

  // The rows of scales, if these are float32, each part has a row of its own, and no scale has a minimum. Else null.
  const float* singles() const {
    return kind_ == ScaleKind::Single && !minimums_ && shared_by_ == 1 ? reinterpret_cast<const float*>(at_) : nullptr;
  }

  void next() {
    if (--left_ > 0) {
      return;
    }
    left_ = shared_by_;
    if (--steps_left_ > 0) {
      at_ += kColumns;
    } else {
      steps_left_ = steps_;
      units_ += both();
      at_ = units_ + (kind_ == ScaleKind::Steps ? kUnits : 0);
    }
  }

  float scale(int64_t column) const { return one(0, column); }
  float minimum(int64_t column) const { return one(plane_, column); }

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  __m256 eight_scales(int64_t column) const { return eight(0, column); }
  __m256 eight_minimums(int64_t column) const { return eight(plane_, column); }
#endif
#if defined(CPU_CAPABILITY_AVX512)
  __m512 sixteen_scales(int64_t column) const { return sixteen(0, column); }
  __m512 sixteen_minimums(int64_t column) const { return sixteen(plane_, column); }
#endif

 private:
  // Bytes of what the numbers of some rows are multiplied with.
  static constexpr int64_t kUnits = kColumns * 2;

  int64_t item() const { return kind_ == ScaleKind::Half ? 2 : 4; }
  // Bytes of scales and minimums that lie together.
  int64_t both() const { return plane_ * (minimums_ ? 2 : 1); }

  float one(int64_t plane, int64_t column) const {
    const char* const from = at_ + plane;
    switch (kind_) {
      case ScaleKind::Single:
        return reinterpret_cast<const float*>(from)[column];
      case ScaleKind::Half:
        return reinterpret_cast<const c10::Half*>(from)[column];
      default:
        return static_cast<float>(reinterpret_cast<const int8_t*>(from)[column]) *
            static_cast<float>(reinterpret_cast<const c10::Half*>(units_ + plane)[column]);
    }
  }

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  static __m256 eight_halves(const char* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  __m256 eight(int64_t plane, int64_t column) const {
    const char* const from = at_ + plane;
    switch (kind_) {
      case ScaleKind::Single:
        return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + column);
      case ScaleKind::Half:
        return eight_halves(from + column * 2);
      default: {
        const __m128i numbers = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + column));
        return _mm256_mul_ps(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)), eight_halves(units_ + plane + column * 2));
      }
    }
  }
#endif
#if defined(CPU_CAPABILITY_AVX512)
  static __m512 sixteen_halves(const char* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  __m512 sixteen(int64_t plane, int64_t column) const {
    const char* const from = at_ + plane;
    switch (kind_) {
      case ScaleKind::Single:
        return _mm512_loadu_ps(reinterpret_cast<const float*>(from) + column);
      case ScaleKind::Half:
        return sixteen_halves(from + column * 2);
      default: {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + column));
        return _mm512_mul_ps(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)), sixteen_halves(units_ + plane + column * 2));
      }
    }
  }
#endif

  ScaleKind kind_;
  bool minimums_;
  // Rows that share units, and how many of these are left.
  int64_t steps_, steps_left_;
  // Bytes from a scale to its minimum.
  int64_t plane_;
  // Parts that have one row of scales, and how many of these are left.
  int64_t shared_by_, left_;
  const char* units_;
  const char* at_;
};

}  // namespace
}  // namespace speccompile
