// y = x * w^T + b, weights rounded to four bits in groups of a multiple of 32 along the inputs, inputs to eight in groups
// of 64. All tiles compute the same bits: integers, and multiply-adds in one order.
#include "four_bits.h"

namespace speccompile {

const RoundedForm kInt4 = rounded_form<FourBits<four_bits::Int4Numbers>>();

}  // namespace speccompile
