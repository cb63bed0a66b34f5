// Products of attention in pairs of bfloat16, by AVX512-BF16: two features of a key, or two places of a value, at once.
// Queries, keys and values are bfloat16 already; weights are rounded to it, as transformers' attention rounds them. Sums
// are float32. A pair of places always begins at an even one of a block: a sum has the same bits whatever queries are
// beside it.
#pragma once

#include "float_products.h"

namespace speccompile {

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)

constexpr bool kHasPairs = true;

// Whether all sizes fill vectors.
inline bool are_pairs(const Attention& p) {
  return p.type == Type::BFloat16 && p.cache_type == Type::BFloat16 && !p.in_8_bits && p.depth % kColumns == 0 &&
      p.value_depth % kColumns == 0;
}

// c[ROWS, kColumns] = scale * (a[ROWS, first to last] * pairs[first to last, kColumns]), or c goes on.
template <int ROWS, int LINES, typename Pairs>
inline void pair_tile(
    const uint32_t* a, int64_t a_stride, int64_t first, int64_t last, const Pairs& pairs, float scale, float* c,
    int64_t c_stride, Sum sum, Ahead ahead) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row) {
    sums[row][0] = sum == Sum::Continued ? _mm512_loadu_ps(c + row * c_stride) : _mm512_setzero_ps();
    sums[row][1] = sum == Sum::Continued ? _mm512_loadu_ps(c + row * c_stride + 16) : _mm512_setzero_ps();
  }
  for (int64_t step = first; step < last; ++step) {
    __m512i low, high;
    pairs.load(step, low, high);
    ahead.fetch<LINES>(step - first);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(a[row * a_stride + step]));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], factor, reinterpret_cast<__m512bh>(low));
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], factor, reinterpret_cast<__m512bh>(high));
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(c + row * c_stride, _mm512_mul_ps(sums[row][0], _mm512_set1_ps(scale)));
    _mm512_storeu_ps(c + row * c_stride + 16, _mm512_mul_ps(sums[row][1], _mm512_set1_ps(scale)));
  }
}

template <int ROWS, typename Pairs>
inline void pair_tile_of(
    int64_t rows, const uint32_t* a, int64_t a_stride, int64_t first, int64_t last, const Pairs& pairs, float scale,
    float* c, int64_t c_stride, Sum sum, Ahead ahead) {
  if (rows == ROWS) {
    ahead.with_lines<2>([&](auto lines) {
      pair_tile<ROWS, decltype(lines)::value>(a, a_stride, first, last, pairs, scale, c, c_stride, sum, ahead);
    });
  } else if constexpr (ROWS > 1) {
    pair_tile_of<ROWS - 1>(rows, a, a_stride, first, last, pairs, scale, c, c_stride, sum, ahead);
  }
}

// Any number of rows; the lines that `ahead` names are fetched in the first pass.
template <typename Pairs>
inline void pair_product(
    int64_t rows, const uint32_t* a, int64_t a_stride, int64_t first, int64_t last, const Pairs& pairs, float scale,
    float* c, int64_t c_stride, Sum sum, Ahead ahead) {
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = rows * pass / passes, end = rows * (pass + 1) / passes;
    pair_tile_of<kMostRows>(
        end - row, a + row * a_stride, a_stride, first, last, pairs, scale, c + row * c_stride, c_stride, sum,
        pass == 0 ? ahead : Ahead());
  }
}

// Pairs of features of kColumns keys, turned over.
struct KeyPairs {
  const uint32_t* from;

  void load(int64_t step, __m512i& low, __m512i& high) const {
    low = _mm512_loadu_si512(from + step * kColumns);
    high = _mm512_loadu_si512(from + step * kColumns + 16);
  }
};

// Pairs of places of kColumns features; zeros before the place `first` and from `last` on.
struct ValuePairs {
  const c10::BFloat16* from;
  int64_t stride, first, last;

  void load(int64_t step, __m512i& low, __m512i& high) const {
    const __m512i even = row(2 * step), odd = row(2 * step + 1);
    const __m512i inner = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    low = _mm512_permutex2var_epi16(even, inner, odd);
    high = _mm512_permutex2var_epi16(even, _mm512_add_epi16(inner, _mm512_set1_epi16(16)), odd);
  }

  __m512i row(int64_t place) const {
    return place < first || place >= last ? _mm512_setzero_si512() : _mm512_loadu_si512(from + place * stride);
  }
};

// Keys as turn_square reads them: two features are one number.
struct PairSquare {
  const c10::BFloat16* from;
  int64_t stride;

  __m512 vector(int64_t row, int64_t) const { return _mm512_loadu_ps(reinterpret_cast<const float*>(from + row * stride)); }
};

// Queries are not scaled, and each is the first half of its row.
struct PairProducts {
  using Cached = c10::BFloat16;
  static constexpr int64_t kFeatures = 2;

  static int64_t tile(const Attention& p) { return p.depth / 2 * kColumns; }

  template <typename Each>
  static void turn(const Attention& p, const Cached* keys, int64_t live, float* to, Each each) {
    alignas(64) Cached square[kSide * 2 * kSide];
    for (int64_t place = 0; place < kColumns; place += kSide) {
      const int64_t count = std::clamp<int64_t>(live - place, 0, kSide);
      for (int64_t feature = 0; feature < p.depth; feature += 2 * kSide) {
        const Cached* first = keys + place * p.k.place + feature;
        float* turned = to + feature / 2 * kColumns + place;
        if (count == kSide) {
          turn_square(PairSquare{first, p.k.place}, turned, kColumns);
        } else {
          std::fill_n(square, kSide * 2 * kSide, Cached(0.0f));
          for (int64_t i = 0; i < count; ++i) {
            std::copy_n(first + i * p.k.place, 2 * kSide, square + i * 2 * kSide);
          }
          turn_square(PairSquare{square, 2 * kSide}, turned, kColumns);
        }
        each(place, feature, feature + 2 * kSide);
      }
    }
  }

  static void put_key(const Attention& p, const Cached* key, float* column) {
    for (int64_t i = 0; i < p.depth / 2; ++i) {
      std::memcpy(column + i * kColumns, key + 2 * i, sizeof(float));
    }
  }

  static void score(const Attention& p, int64_t many, const float* queries, const float* keys, float* scores, Ahead ahead) {
    const KeyPairs pairs{reinterpret_cast<const uint32_t*>(keys)};
    const auto* own = reinterpret_cast<const uint32_t*>(queries);
    pair_product(many, own, p.depth, 0, p.depth / 2, pairs, p.scale, scores, kBlock, Sum::New, ahead);
  }

  // In the first half of each row.
  static void round_weights(float* weights, int64_t queries, int64_t places) {
    for (int64_t query = 0; query < queries; ++query) {
      float* const own = weights + query * kBlock;
      auto* const to = reinterpret_cast<Cached*>(own);
      for (int64_t i = 0; i < padded(places); i += 32) {
        const __m512 low = _mm512_loadu_ps(own + i), high = _mm512_loadu_ps(own + i + 16);
        _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
      }
    }
  }

  static int64_t whole(int64_t places) { return places / 2 * 2; }

  static void add_up(
      const Attention& p, int64_t queries, const float* weights, const Cached* values, int64_t first, int64_t last,
      float* sums, Stream& stream) {
    const int64_t begin = first / 2, end = (last + 1) / 2;
    for (int64_t column = 0; column < p.value_depth; column += kColumns) {
      const ValuePairs pairs{values + column, p.v.place, first, last};
      pair_product(
          queries, reinterpret_cast<const uint32_t*>(weights), kBlock, begin, end, pairs, 1.0f, sums + column,
          p.value_depth, Sum::New, stream.next(end - begin));
    }
  }

  static void put_value(const Attention& p, const Cached* value, float* rows, int64_t place) {
    auto* const to = reinterpret_cast<Cached*>(rows) + place * p.value_depth;
    if (value != nullptr) {
      std::copy_n(value, p.value_depth, to);
    } else {
      std::fill_n(to, p.value_depth, Cached(0.0f));
    }
  }

  static void add_rows(
      const Attention& p, int64_t queries, const float* weights, const float* rows, int64_t first, int64_t last,
      float* sums) {
    for (int64_t column = 0; column < p.value_depth; column += kColumns) {
      const ValuePairs pairs{reinterpret_cast<const Cached*>(rows) + column, p.value_depth, first / 2 * 2, last};
      pair_product(
          queries, reinterpret_cast<const uint32_t*>(weights), kBlock, first / 2, (last + 1) / 2, pairs, 1.0f,
          sums + column, p.value_depth, Sum::Continued, {});
    }
  }
};

#else

constexpr bool kHasPairs = false;

inline bool are_pairs(const Attention&) {
  return false;
}

using PairProducts = FloatProducts<float>;

#endif

}  // namespace speccompile
