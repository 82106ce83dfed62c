#include "cpu/flush.h"
#include "cpu/fp6.h"
#include "cpu/kernels.h"
#include "cpu/lanes_avx2.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {
#include "cpu/simd.inc"
}  // namespace

const Kernels kAvx2Kernels = VectorKernels("avx2");

}  // namespace te_flax::cpu
