// Products of attention in float32: queries with a block of keys, weights with its values.
//
// A form of products turns keys over, so that a vector has one feature of many keys, and multiplies. FloatProducts and
// PairProducts (pair_products.h) have the same functions.
#pragma once

#include "attention.h"
#include "buffer.h"
#include "cached_rows.h"

namespace speccompile {

inline int64_t padded(int64_t size, int64_t to = kColumns) {
  return (size + to - 1) / to * to;
}

// Writes to[padded(depth), kColumns]: `live` keys, of which there may be fewer than kColumns, turned over, then zeros.
// After some features of some keys `each(first key, first feature, last feature)` is called.
template <typename T, typename Each>
inline void turn_over(const T* from, int64_t stride, int64_t live, int64_t depth, float* to, Each each) {
  alignas(64) float square[kSide * kSide];
  for (int64_t place = 0; place < kColumns; place += kSide) {
    const int64_t count = std::clamp<int64_t>(live - place, 0, kSide);
    for (int64_t feature = 0; feature < depth; feature += kSide) {
      const int64_t wanted = std::min(kSide, depth - feature);
      const T* first = from + place * stride;
      float* turned = to + feature * kColumns + place;
      if (count == kSide && wanted == kSide) {
        turn_square(SquareOf<T>{first, stride, depth, feature}, turned, kColumns);
      } else {
        std::fill_n(square, kSide * kSide, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
          widen_row(first + i * stride, depth, feature, wanted, square + i * kSide);
        }
        turn_square(Square<float>{square, kSide}, turned, kColumns);
      }
      each(place, feature, feature + wanted);
    }
  }
}

// Memory that products fetch while they multiply, some bytes in each step: about as many as they read of theirs.
class Stream {
 public:
  Stream() = default;
  Stream(const void* from, int64_t bytes, int64_t steps)
      : from_(static_cast<const char*>(from)), each_((bytes + steps - 1) / steps) {}

  // For the next product, which has so many steps.
  Ahead next(int64_t steps) {
    if (from_ == nullptr) {
      return {};
    }
    const Ahead found{from_, each_};
    from_ += steps * each_;
    return found;
  }

 private:
  const char* from_ = nullptr;
  int64_t each_ = 0;
};

// Over a cache of T. Queries are scaled.
template <typename T>
struct FloatProducts {
  using Cached = T;
  // Features that a step of a product reads.
  static constexpr int64_t kFeatures = 1;
  // So many gain more from values side by side in float32 than widening them once costs.
  static constexpr int64_t kManyQueries = 4;

  // Floats of kColumns keys.
  static int64_t tile(const Attention& p) { return padded(p.depth) * kColumns; }

  template <typename Each>
  static void turn(const Attention& p, const T* keys, int64_t live, float* to, Each each) {
    turn_over(keys, p.k.place, live, p.depth, to, each);
  }

  // Writes one key into its column.
  static void put_key(const Attention& p, const T* key, float* column) {
    float* const wide = buffer().at_least(p.depth);
    widen_row(key, p.depth, 0, p.depth, wide);
    for (int64_t i = 0; i < p.depth; ++i) {
      column[i * kColumns] = wide[i];
    }
  }

  // scores[many, kColumns of kBlock] = queries[many, depth] * keys
  static void score(const Attention& p, int64_t many, const float* queries, const float* keys, float* scores, Ahead ahead) {
    product_ahead<float>(many, queries, p.depth, keys, kColumns, p.depth, scores, kBlock, Sum::New, ahead);
  }

  // What weights become before they are multiplied.
  static void round_weights(float*, int64_t, int64_t) {}

  // The places from the beginning of a block that are added up without those after them.
  static int64_t whole(int64_t places) { return places; }

  // sums[queries, columns] = weights[queries, kBlock] * values[kBlock, columns], from the place `first` to `last`. Values of
  // 8 bits, those whose size is no multiple of kColumns, and those of half precision for many queries are widened first.
  static void add_up(
      const Attention& p, int64_t queries, const float* weights, const T* values, int64_t first, int64_t last,
      float* sums, Stream& stream) {
    const int64_t columns = padded(p.value_depth), places = last - first;
    const auto multiply = [&](const auto* rows, int64_t stride) {
      for (int64_t column = 0; column < columns; column += kColumns) {
        product_ahead(
            queries, weights + first, kBlock, rows + column, stride, places, sums + column, columns, Sum::New,
            stream.next(places));
      }
    };
    if constexpr (!std::is_same_v<T, int8_t>) {
      if (columns == p.value_depth && (std::is_same_v<T, float> || queries < kManyQueries)) {
        multiply(values + first * p.v.place, p.v.place);
        return;
      }
    }
    float* copied = buffer().at_least(kBlock * columns);
    for (int64_t place = 0; place < places; ++place) {
      put_value(p, values + (first + place) * p.v.place, copied, place);
    }
    multiply(static_cast<const float*>(copied), columns);
  }

  // Writes one value, and zeros after it, into the row of its place; without one, zeros.
  static void put_value(const Attention& p, const T* value, float* rows, int64_t place) {
    const int64_t columns = padded(p.value_depth);
    float* const to = rows + place * columns;
    if (value != nullptr) {
      widen_row(value, p.value_depth, 0, p.value_depth, to);
    }
    std::fill(to + (value != nullptr ? p.value_depth : 0), to + columns, 0.0f);
  }

  // The same sums go on with rows that were put.
  static void add_rows(
      const Attention& p, int64_t queries, const float* weights, const float* rows, int64_t first, int64_t last,
      float* sums) {
    const int64_t columns = padded(p.value_depth);
    for (int64_t i = 0; i < columns; i += kColumns) {
      product_ahead<float>(
          queries, weights + first, kBlock, rows + first * columns + i, columns, last - first, sums + i, columns,
          Sum::Continued);
    }
  }

 private:
  static Buffer& buffer() {
    thread_local Buffer mine;
    return mine;
  }
};

}  // namespace speccompile
