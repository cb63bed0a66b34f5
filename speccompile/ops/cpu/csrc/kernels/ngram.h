// The n-gram match of one text, see ngram.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Writes drafts[drafted]; returns how many of them count: all, or none.
int64_t match_ngram(
    const int64_t* tokens, int64_t length, int64_t longest, int64_t shortest, int64_t* drafts, int64_t drafted);

}  // namespace speccompile
