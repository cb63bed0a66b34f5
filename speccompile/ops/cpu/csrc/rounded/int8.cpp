// y = x * w^T + b, both rounded to eight bits: inputs in groups of 64, weights in groups of 16, 32, or a multiple of 64.
// All tiles compute the same bits: integers, and multiply-adds in one order.
#include "rounded_blocks.h"

// What the compiler may use says less than what torch's vectors are built for: Inductor asks for all that this CPU has.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
#include "int8_avx512.h"
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include "int8_avx2.h"
#else
#include "int8_plain.h"
#endif

namespace speccompile {
namespace {

struct Int8 {
  using Inputs = int8::Inputs;
  using Number = int8_t;
  static constexpr int kRows = int8::kRows;
  static constexpr int64_t kSteps = int8::kSteps, kStepBytes = int8::kStepBytes;
  static constexpr bool kMinimums = true;

  // None where a group would be divided in another way than into one, two or four.
  static int64_t parts(int64_t groups, int64_t scale_rows) {
    if (scale_rows <= groups) {
      return groups;
    }
    return scale_rows == 2 * groups || scale_rows == 4 * groups ? scale_rows : 0;
  }

  template <int ROWS, int LINES, typename... Arguments>
  static void tile(Arguments... arguments) {
    int8::tile<ROWS, LINES>(arguments...);
  }

  static int32_t number(int64_t k, int64_t column, const int8_t* packed, bool) {
    return packed[k / 4 * int8::kStepBytes + column * 4 + k % 4];
  }
};

}  // namespace

const RoundedForm kInt8 = rounded_form<Int8>();

}  // namespace speccompile
