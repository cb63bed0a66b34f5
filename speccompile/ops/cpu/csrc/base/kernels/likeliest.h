// The likeliest tokens of a place, see likeliest.cpp.
#pragma once

#include <cstdint>
#include <optional>

#include "linear.h"

namespace speccompile {

// The `count` greatest of scores[vocab], with a key plus the noise that follows from it, the greatest first and of equal
// ones the first id; and the logarithms of their shares in the softmax over all. -1 and -inf for
// tokens that are forbidden, and for all tokens where a score is NaN or +inf.
void likeliest(
    Type type, const void* scores, int64_t vocab, int64_t count, std::optional<uint64_t> key, int64_t* tokens,
    float* logprobs);

}  // namespace speccompile
