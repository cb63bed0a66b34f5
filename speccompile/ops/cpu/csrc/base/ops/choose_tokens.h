// The token of every place, by the threads of the op, and the second look at places that are too close to call.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../kernels/choose.h"
#include "share.h"

namespace speccompile {

// Work for a thread: so many ids of one place.
constexpr int64_t kPiece = 16384;

// What the noise of a place follows from. All addresses are those of tensors.
struct Noise {
  const float* temperature = nullptr;  // None: no noise.
  const int64_t* seed = nullptr;
  // The slot of each row; none: temperature, seed and length are those of the rows.
  const int64_t* slots = nullptr;
  // Of each place; none: `length` and the distance `depths` from it, or the index of the place.
  const int64_t* positions = nullptr;
  const int64_t* length = nullptr;
  const int64_t* depths = nullptr;
  const int64_t* start = nullptr;  // Of each row, or none.
  int64_t stream = 0;

  int64_t slot(int64_t row) const {
    return slots ? slots[row] : row;
  }

  bool drawn(int64_t row) const {
    return temperature && temperature[slot(row)] > 0;
  }

  int64_t position(int64_t row, int64_t width, int64_t at) const {
    return positions ? positions[at] : length[slot(row)] + (depths ? depths[at] : at % width);
  }

  std::optional<int64_t> started(int64_t row) const {
    return start ? std::optional<int64_t>(start[row]) : std::nullopt;
  }
};

// Scores [rows, width, vocab], with distances in bytes.
struct Places {
  const char* scores;
  Type type;
  int64_t rows, width, vocab;
  int64_t row_bytes, place_bytes;

  const char* place(int64_t at) const {
    return scores + at / width * row_bytes + at % width * place_bytes;
  }
};

// Chooses one token by torch's own logarithms, and writes it to `token`, or fails. ops/choose.py sets it where the library
// is loaded. An exception of Python there ends the call without a word, so what it returns could not be trusted.
using ChooseAgain = void (*)(
    const void* scores, int64_t bytes, bool is_bfloat16, int64_t vocab, int64_t seed, int64_t stream, int64_t position,
    const int64_t* start, bool forbids, int64_t first_id, int64_t* token);

SPECCOMPILE_SHARED extern ChooseAgain choose_again;

inline int64_t choose_closely(
    const Places& places, const Noise& noise, int64_t at, bool forbids, int64_t first_id, int64_t token) {
  if (!choose_again) {
    return token;
  }
  const int64_t row = at / places.width, bytes = places.type == Type::Float ? 4 : 2;
  const std::optional<int64_t> start = noise.started(row);
  int64_t chosen = -2;
  choose_again(
      places.place(at), bytes, places.type == Type::BFloat16, places.vocab, noise.seed[noise.slot(row)], noise.stream,
      noise.position(row, places.width, at), start ? &*start : nullptr, forbids, first_id, &chosen);
  if (chosen < -1 || chosen >= places.vocab) {
    throw std::runtime_error("speccompile::choose: a token could not be chosen again, or this was interrupted");
  }
  return chosen;
}

// token[at] is -1 where a score is NaN and, with `forbids`, where all scores are -inf.
inline void choose_tokens(const Places& places, const Noise& noise, bool forbids, int64_t first_id, int64_t* token) {
  const int64_t vocab = places.vocab, count = places.rows * places.width, pieces = (vocab + kPiece - 1) / kPiece;
  thread_local std::vector<Best> all;
  all.resize(std::max<size_t>(all.size(), count * pieces));
  Best* const found = all.data();
  parallel_for(0, count * pieces, 1, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i / pieces, piece = i % pieces, row = at / places.width;
      std::optional<uint64_t> key;
      if (noise.drawn(row)) {
        key = key_of(
            noise.seed[noise.slot(row)], noise.stream, noise.position(row, places.width, at), noise.started(row));
      }
      const int64_t end = std::min((piece + 1) * kPiece, vocab);
      found[i] = best_of(places.type, places.place(at), piece * kPiece, end, key, first_id);
    }
  });
  for (int64_t at = 0; at < count; ++at) {
    Best best = found[at * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      best = join(best, found[at * pieces + piece]);
    }
    const bool none = best.is_nan || (forbids && best.top == -std::numeric_limits<float>::infinity());
    token[at] = none ? -1 : best.token;
    if (!none && noise.drawn(at / places.width) && is_close(best)) {
      token[at] = choose_closely(places, noise, at, forbids, first_id, token[at]);
    }
  }
}

}  // namespace speccompile
