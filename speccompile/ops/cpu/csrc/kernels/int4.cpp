// y = x * w^T + b, weights rounded to four bits in groups of 32 along the inputs, inputs to eight in groups of 64. All
// tiles compute the same bits: integers, and multiply-adds in one order.
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
  using Scale = c10::Half;
  static constexpr int kRows = int4::kRows;
  static constexpr int64_t kSteps = int4::kParts * int4::kPartSteps, kStepBytes = int4::kStepBytes,
                           kScales = int4::kParts;

  template <int ROWS, int LINES, typename... Arguments>
  static void tile(Arguments... arguments) {
    int4::tile<ROWS, LINES>(arguments...);
  }

  static void weight_row(
      int64_t row, int64_t depth, int64_t groups, const uint8_t* packed, const c10::Half* scales, float* to) {
    const int64_t block = row / kColumns, column = row % kColumns, place = column % (kColumns / 2);
    const uint8_t* numbers = packed + block * groups * int4::kGroupBytes + place * 4;
    for (int64_t k = 0; k < depth; ++k) {
      const float scale = scales[(block * groups * int4::kParts + k / int4::kPart) * kColumns + column];
      const int32_t both = numbers[k / 4 * int4::kStepBytes + k % 4];
      to[k] = static_cast<float>((place == column ? both & 15 : both >> 4) - int4::kOffset) * scale;
    }
  }
};

}  // namespace

const RoundedForm kInt4 = rounded_form<Int4>();

}  // namespace speccompile
