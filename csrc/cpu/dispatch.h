// Chooses the kernel table for the running CPU.
#ifndef TE_FLAX_CPU_DISPATCH_H_
#define TE_FLAX_CPU_DISPATCH_H_

#include "cpu/kernels.h"

namespace te_flax::cpu {

// The best table that this CPU runs, or the one that TE_FLAX_SIMD names. Decided once. A value
// of TE_FLAX_SIMD that is unknown or that this CPU does not run throws std::invalid_argument;
// te_flax/ops/_extension.py asks before it registers any handler, so that no handler throws.
const Kernels& Active();

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_DISPATCH_H_
