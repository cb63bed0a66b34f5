// y = x * w^T + b, both rounded to eight bits in groups of 64 along the inputs.
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
  using Scale = float;
  static constexpr int kRows = int8::kRows;
  static constexpr int64_t kSteps = int8::kSteps, kStepBytes = int8::kStepBytes, kScales = 1;

  template <int ROWS, int LINES, typename... Arguments>
  static void tile(Arguments... arguments) {
    int8::tile<ROWS, LINES>(arguments...);
  }

  static void weight_row(
      int64_t row, int64_t depth, int64_t groups, const int8_t* packed, const float* scales, float* to) {
    const int64_t block = row / kColumns, column = row % kColumns;
    const int8_t* numbers = packed + block * groups * int8::kGroupBytes + column * 4;
    for (int64_t k = 0; k < depth; ++k) {
      const float scale = scales[(block * groups + k / kGroup) * kColumns + column];
      to[k] = static_cast<float>(numbers[k / 4 * kColumns * 4 + k % 4]) * scale;
    }
  }
};

}  // namespace

const RoundedForm kInt8 = rounded_form<Int8>();

}  // namespace speccompile
