// The table of CPU kernels. One object file per instruction set exports one table.
//
// This header and everything that the SIMD objects include may use <stdint.h> and
// <immintrin.h> only: a std:: template compiled with -mavx2 could be the copy that the linker
// keeps for everybody (tests/test_build.py looks for weak symbols).
#ifndef TE_FLAX_CPU_KERNELS_H_
#define TE_FLAX_CPU_KERNELS_H_

#include <stdint.h>

namespace te_flax::cpu {

struct Kernels {
  const char* name;  // "base", "avx2" or "avx512"

  // Joins n float32 bit patterns into *amax (bits of the largest finite |x|, values below 2^-126
  // count as 0) and *nonfinite (1 when a NaN or Inf is met).
  void (*amax_f32)(const uint32_t* x, int64_t n, uint32_t* amax, uint32_t* nonfinite);
};

extern const Kernels kBaseKernels;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_KERNELS_H_
