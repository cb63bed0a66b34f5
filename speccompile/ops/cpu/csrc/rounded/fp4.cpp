// As int4.cpp, with weights of floating point of four bits, which have no minimums.
#include "four_bits.h"

namespace speccompile {

const RoundedForm kFp4 = rounded_form<FourBits<four_bits::Fp4Numbers>>();

}  // namespace speccompile
