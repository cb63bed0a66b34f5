// How the work of attention is shared out. It knows no tensors: what it is given can be called again and again.
#pragma once

#include "../kernels/attention.h"

namespace speccompile {

// The whole op: keys and values are written if the step rotates, then all queries attend.
void attend(const Attention& problem);

}  // namespace speccompile
