// y = x * w^T + b, weights rounded to four bits in groups of a multiple of 32 along the inputs, inputs to eight in groups
// of 64. All tiles compute the same bits: integers, and multiply-adds in one order.
#include "rounded_blocks.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
#include "int4_avx512.h"
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include "int4_avx2.h"
#else
#include "int4_plain.h"
#endif

namespace speccompile {
namespace {

struct Int4 {
  using Inputs = int4::Inputs;
  using Number = uint8_t;
  static constexpr int kRows = int4::kRows;
  static constexpr int64_t kSteps = int4::kParts * int4::kPartSteps, kStepBytes = int4::kStepBytes;

  static int64_t parts(int64_t groups, int64_t) {
    return groups * int4::kParts;
  }

  template <int ROWS, int LINES, typename... Arguments>
  static void tile(Arguments... arguments) {
    int4::tile<ROWS, LINES>(arguments...);
  }

  static int32_t number(int64_t k, int64_t column, const uint8_t* packed, bool minimums) {
    const int64_t place = column % (kColumns / 2);
    const int32_t both = packed[k / 4 * int4::kStepBytes + place * 4 + k % 4];
    return (place == column ? both & 15 : both >> 4) - (minimums ? 0 : int4::kOffset);
  }
};

}  // namespace

const RoundedForm kInt4 = rounded_form<Int4>();

}  // namespace speccompile
