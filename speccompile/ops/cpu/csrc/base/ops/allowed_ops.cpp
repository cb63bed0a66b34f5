// Tokens that a bit mask forbids: keep_allowed.py defines it.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../kernels/tile.h"
#include "ops.h"
#include "tensors.h"

namespace speccompile {
namespace {

constexpr int64_t kBits = 8;

template <typename T>
void keep_allowed(const uint8_t* bits, int64_t vocab, T* scores) {
  const T forbidden = static_cast<T>(kForbidden);
  for (int64_t first = 0; first < vocab; first += kBits) {
    const uint8_t allowed = bits[first / kBits];
    const int64_t count = std::min(kBits, vocab - first);
    if (allowed == 0) {
      std::fill_n(scores + first, count, forbidden);
    } else if (allowed != 0xff) {
      for (int64_t i = 0; i < count; ++i) {
        scores[first + i] = allowed >> i & 1 ? scores[first + i] : forbidden;
      }
    }
  }
}

void keep_allowed_op(Tensor scores, const Tensor& bits) {
  const int64_t vocab = scores.numel();
  STD_TORCH_CHECK(
      scores.dim() == 1 && scores.is_contiguous() && bits.is_contiguous() &&
          bits.scalar_type() == ScalarType::Byte && bits.numel() == (vocab + kBits - 1) / kBits,
      "speccompile::keep_allowed_: the sizes do not fit");
  with_type(type_of(scores), [&](auto zero) {
    using T = decltype(zero);
    keep_allowed(static_cast<const uint8_t*>(bits.data_ptr()), vocab, static_cast<T*>(scores.data_ptr()));
  });
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("keep_allowed_", TORCH_BOX(&keep_allowed_op));
}

}  // namespace
}  // namespace speccompile
