// The likeliest tokens of a place, with their log-probabilities: which drafts a tree branches into.
#include "likeliest.h"

#include "noise.h"
#include "tile.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace speccompile {
namespace {

// Scores as float, with their noise; after the last one, up to a multiple of kChunk, what is forbidden. Returns the
// greatest of each chunk, and whether one is NaN.
template <typename T>
bool noised(const T* scores, int64_t vocab, std::optional<uint64_t> key, float* to, float* greatest) {
  Vec spoiled(0.0f);
  for (int64_t at = 0; at < vocab; at += kChunk) {
    Vec values[kChunkVecs];
    if (at + kChunk <= vocab) {
      Loader<T>::template load<kChunkVecs>(scores + at, values);
    } else {
      float rest[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) {
        rest[i] = at + i < vocab ? static_cast<float>(scores[at + i]) : kForbidden;
      }
      Loader<float>::load<kChunkVecs>(rest, values);
    }
    const auto most = [&] {
      Vec top = values[0];
      for (int v = 1; v < kChunkVecs; ++v) {
        top = at::vec::maximum(top, values[v]);
      }
      return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, top);
    };
    float top = most();
    if (key && top != kForbidden) {
      float drawn[kChunk];
      uniforms(*key, at, drawn);
      for (int v = 0; v < kChunkVecs; ++v) {
        values[v] = values[v] + gumbel_of(Vec::loadu(drawn + v * kLanes));
      }
      top = most();
    }
    for (int v = 0; v < kChunkVecs; ++v) {
      spoiled = spoiled | (values[v] != values[v]);
      values[v].store(to + at + v * kLanes);
    }
    greatest[at / kChunk] = top;
  }
  return spoiled.zero_mask() != (1 << kLanes) - 1;
}

float log_of_sum(const float* values, int64_t count, float top) {
  Vec sum(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    sum = sum + (Vec::loadu(values + i) - Vec(top)).exp();
  }
  return std::log(at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum)) + top;
}

template <typename T>
void likeliest_typed(
    const T* scores, int64_t vocab, int64_t count, std::optional<uint64_t> key, int64_t* tokens, float* logprobs) {
  thread_local std::vector<float> values, greatest;
  const int64_t chunks = (vocab + kChunk - 1) / kChunk;
  values.resize(chunks * kChunk);
  greatest.resize(chunks);
  std::fill_n(tokens, count, -1);
  std::fill_n(logprobs, count, kForbidden);
  if (noised(scores, vocab, key, values.data(), greatest.data())) {
    return;
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    // Of equal ones the first: only what is greater than the last of the best comes in.
    if (!(greatest[chunk] > logprobs[count - 1])) {
      continue;
    }
    for (int64_t id = chunk * kChunk; id < (chunk + 1) * kChunk; ++id) {
      if (!(values[id] > logprobs[count - 1])) {
        continue;
      }
      int64_t at = count - 1;
      for (; at > 0 && values[id] > logprobs[at - 1]; --at) {
        logprobs[at] = logprobs[at - 1];
        tokens[at] = tokens[at - 1];
      }
      logprobs[at] = values[id];
      tokens[at] = id;
    }
  }
  if (!std::isfinite(logprobs[0])) {
    std::fill_n(tokens, count, -1);
    std::fill_n(logprobs, count, kForbidden);
    return;
  }
  const float total = log_of_sum(values.data(), chunks * kChunk, logprobs[0]);
  for (int64_t i = 0; i < count && tokens[i] >= 0; ++i) {
    logprobs[i] -= total;
  }
}

}  // namespace

void likeliest(
    Type type, const void* scores, int64_t vocab, int64_t count, std::optional<uint64_t> key, int64_t* tokens,
    float* logprobs) {
  with_type(type, [&](auto zero) {
    likeliest_typed(static_cast<const decltype(zero)*>(scores), vocab, count, key, tokens, logprobs);
  });
}

}  // namespace speccompile
