#include "cpu/flush.h"
#include "cpu/fp6.h"
#include "cpu/kernels.h"
#include "cpu/lanes_avx512.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {
#include "cpu/simd.inc"
}  // namespace

const Kernels kAvx512Kernels = VectorKernels("avx512");

}  // namespace te_flax::cpu
