// Linears over rounded weights and inputs: int8.cpp, int4.cpp, fp4.cpp.
#pragma once

#include <cstdint>

namespace speccompile {

// Inputs that share a scale.
constexpr int64_t kGroup = 64;

// The scales of a weight: one for each output and each run of inputs, and minimums, which are subtracted from the scaled
// numbers of that run.
//   Single, Half  of float32 or float16, [blocks, rows, 32], or with minimums [blocks, rows, 2, 32].
//   Steps         numbers of eight bits times a float16 that several rows share: bytes [blocks, rows / steps, 64 + 32 *
//                 steps], or with minimums [blocks, rows / steps, 2, ...]. Source: the K-quants of llama.cpp.
enum class ScaleKind { Single, Half, Steps };
struct Scales {
  const void* values;
  int64_t rows;
  ScaleKind kind;
  int64_t steps;
  bool minimums;
};

// A form of rounded weights: how its kernel reads inputs and multiplies.
struct RoundedForm {
  // What a row of rounded inputs takes, in bytes, aligned as new aligns: they lie as this CPU's tile reads them.
  int64_t (*input_bytes)(int64_t groups);
  // Row of x[depth] to inputs[input_bytes(groups)], zeros after depth, and scales[groups]: x is about input * scale.
  void (*round_inputs)(const float* x, int64_t depth, int64_t groups, uint8_t* inputs, float* scales);
  // Output blocks [first, last) of y[rows, features] = x * w^T.
  //   inputs[rows, input_bytes(groups)] and input_scales[rows, groups] are the rounded x;
  //   packed and scales are the weight, packed in the form's own layout.
  void (*blocks)(
      const uint8_t* inputs, const float* input_scales, int64_t rows, int64_t groups, const void* packed,
      const Scales& scales, float* y, int64_t features, int64_t first, int64_t last);
  // Row of the weight, as float32: to[depth].
  void (*weight_row)(int64_t row, int64_t depth, int64_t groups, const void* packed, const Scales& scales, float* to);
  // Whether so many rows of scales divide the inputs as the kernel can: into runs of whole parts.
  bool (*fits)(int64_t groups, int64_t rows);
  // Whether scales may have minimums.
  bool minimums;
};

// packed[ceil(features / 32), groups * 16, 32, 4] int8. A row of scales is for 16, 32, or a multiple of 64 inputs.
extern const RoundedForm kInt8;
// packed[ceil(features / 32), groups * 16, 16, 4] bytes. A byte's low half is a number of columns 0 to 15, its high half
// one of columns 16 to 31: plus 8 without minimums, as it is with them. A row of scales is for a multiple of 32 inputs.
extern const RoundedForm kInt4;
// packed has the layout of kInt4. Four bits are E2M1, doubled: 0, 1, 2, 3, 4, 6, 8 or 12, with a sign. There are no
// minimums. A row of scales is for 16 inputs, or for a multiple of 32.
extern const RoundedForm kFp4;

}  // namespace speccompile
