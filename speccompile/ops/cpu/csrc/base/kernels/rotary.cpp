// What a step does before it attends: its queries are scaled and copied to where attention reads them, its keys and
// values are written into the cache. Rotary position embeddings are computed on the way, in the form of transformers:
// x * cos + rotate_half(x) * sin, rounded once.
#include "attention.h"

#include "vectors.h"

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
template <typename T>
void fetch_written(const Attention& p, int64_t place) {
  const auto fetch = [&](const Cache& cache, int64_t features) {
    const T* const to = place_of<T>(cache, p.slots[place / p.width], written(p, place));
    for (int64_t head = 0; head < p.groups; ++head) {
      fetch_lines_to_write(to + head * cache.head, features * static_cast<int64_t>(sizeof(T)));
    }
  };
  fetch(p.k, p.depth);
  fetch(p.v, p.value_depth);
}

template <typename T>
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
    rotate(
        x, cos, sin, p.rotates ? r.features : 0, p.depth,
        [to, scale = Vec(p.scale)](int64_t i, const Vec& values, int64_t count) {
          store(rounded<T>(values) * scale, to + i, count);
        });
  }
  if (!p.rotates) {
    return;
  }
  for (int64_t head = 0; head < p.groups; ++head) {
    T* key = place_of<T>(p.k, p.slots[row], at) + head * p.k.head;
    rotate(
        head_of<T>(r.k, p.width, place, head), cos, sin, r.features, p.depth,
        [key](int64_t i, const Vec& values, int64_t count) { store(values, key + i, count); });
    std::copy_n(
        head_of<T>(r.v, p.width, place, head), p.value_depth, place_of<T>(p.v, p.slots[row], at) + head * p.v.head);
  }
}

}  // namespace

void prepare(const Attention& p, int64_t first, int64_t last, float* queries) {
  with_type(p.type, [&](auto zero) {
    for (int64_t place = first; p.rotates && place < last; ++place) {
      fetch_written<decltype(zero)>(p, place);
    }
    for (int64_t place = first; place < last; ++place) {
      prepare_place<decltype(zero)>(p, place, queries);
    }
  });
}

}  // namespace speccompile
