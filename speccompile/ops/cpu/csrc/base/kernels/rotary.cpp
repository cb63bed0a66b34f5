// What a step does before it attends: its queries are scaled and copied to where attention reads them, its keys and
// values are written into the cache. Rotary position embeddings are computed on the way, in the form of transformers:
// x * cos + rotate_half(x) * sin, rounded once.
#include "attention.h"

#include "buffer.h"
#include "pair_products.h"

namespace speccompile {
namespace {

template <typename T>
const T* head_of(const Heads& heads, int64_t width, int64_t place, int64_t head) {
  return static_cast<const T*>(heads.from) + place / width * heads.row + place % width * heads.place +
      head * heads.head;
}

// Calls `write(i, values, count)` for all features of a head. Their values are not rounded to T yet.
template <typename T, typename Write>
void rotate(const T* x, const T* cos, const T* sin, int64_t rotated, int64_t features, Write write) {
  const int64_t half = rotated / 2;
  by_vectors(half, [&](int64_t i, int64_t count) {
    const int64_t j = half + i;
    const Vec low = load(x + i, count), high = load(x + j, count);
    // Both products are rounded, as transformers' are.
    write(i, low * load(cos + i, count) - high * load(sin + i, count), count);
    write(j, high * load(cos + j, count) + low * load(sin + j, count), count);
  });
  by_vectors(features - rotated, [&](int64_t i, int64_t count) {
    write(rotated + i, load(x + rotated + i, count), count);
  });
}

// Where the key and the value of a place are written: the nodes of a tree lie in the order of their numbers.
int64_t written(const Attention& p, int64_t place) {
  return p.parents ? p.positions[place / p.width * p.width] + place % p.width : p.positions[place];
}

// A step's keys and values go to memory that no cache has.
template <typename Cached>
void fetch_written(const Attention& p, int64_t place) {
  const auto fetch = [&](const Cache& cache, int64_t features) {
    const Cached* const to = place_of<Cached>(cache, p.pages, p.slots[place / p.width], written(p, place));
    for (int64_t head = 0; head < p.groups; ++head) {
      fetch_lines_to_write(to + head * cache.head, row_size<Cached>(features) * static_cast<int64_t>(sizeof(Cached)));
    }
  };
  fetch(p.k, p.depth);
  fetch(p.v, p.value_depth);
}

// Writes a row into the cache: `produce(write)` calls `write(i, values, count)` for all of its features.
template <typename Cached, typename Produce>
void write_row(int64_t features, Cached* to, const Produce& produce) {
  if constexpr (std::is_same_v<Cached, int8_t>) {
    thread_local Buffer buffer;
    float* const wide = buffer.at_least(features);
    produce([wide](int64_t i, const Vec& values, int64_t count) { store(values, wide + i, count); });
    round_row(wide, features, to);
  } else {
    produce([to](int64_t i, const Vec& values, int64_t count) { store(values, to + i, count); });
  }
}

// Keys and values are rounded to T, as queries are, and then to what the cache has.
template <typename T, typename Cached>
void prepare_place(const Attention& p, int64_t place, float* queries) {
  const int64_t group = p.heads / p.groups, row = place / p.width, at = written(p, place);
  const Rotary& r = p.rotary;
  const T *cos = nullptr, *sin = nullptr;
  if (p.rotates) {
    cos = head_of<T>(r.cos, p.width, place, 0);
    sin = head_of<T>(r.sin, p.width, place, 0);
  }
  for (int64_t head = 0; head < p.heads; ++head) {
    const T* x = head_of<T>(p.q, p.width, place, head);
    float* to = queries + ((head / group * p.rows * p.width + place) * group + head % group) * p.depth;
    const int64_t rotated_features = p.rotates ? r.features : 0;
    if (are_pairs(p)) {
      rotate(x, cos, sin, rotated_features, p.depth, [to](int64_t i, const Vec& values, int64_t count) {
        store(values, reinterpret_cast<T*>(to) + i, count);
      });
    } else {
      rotate(
          x, cos, sin, rotated_features, p.depth,
          [to, scale = Vec(p.scale)](int64_t i, const Vec& values, int64_t count) {
            store(rounded<T>(values) * scale, to + i, count);
          });
    }
  }
  if (!p.rotates) {
    return;
  }
  for (int64_t head = 0; head < p.groups; ++head) {
    Cached* key = place_of<Cached>(p.k, p.pages, p.slots[row], at) + head * p.k.head;
    write_row(p.depth, key, [&](auto write) {
      rotate(
          head_of<T>(r.k, p.width, place, head), cos, sin, r.features, p.depth,
          [write](int64_t i, const Vec& values, int64_t count) {
            write(i, std::is_same_v<T, Cached> ? values : rounded<T>(values), count);
          });
    });
    const T* value = head_of<T>(r.v, p.width, place, head);
    Cached* to = place_of<Cached>(p.v, p.pages, p.slots[row], at) + head * p.v.head;
    if constexpr (std::is_same_v<T, Cached>) {
      std::copy_n(value, p.value_depth, to);
    } else {
      write_row(p.value_depth, to, [&](auto write) {
        by_vectors(p.value_depth, [&](int64_t i, int64_t count) { write(i, load(value + i, count), count); });
      });
    }
  }
}

}  // namespace

void prepare(const Attention& p, int64_t first, int64_t last, float* queries) {
  with_type(p.type, [&](auto given) {
    with_cached(p.cache_type, p.in_8_bits, [&](auto cached) {
      for (int64_t place = first; p.rotates && place < last; ++place) {
        fetch_written<decltype(cached)>(p, place);
      }
      for (int64_t place = first; place < last; ++place) {
        prepare_place<decltype(given), decltype(cached)>(p, place, queries);
      }
    });
  });
}

}  // namespace speccompile
