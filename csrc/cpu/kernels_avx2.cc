#include "cpu/kernels.h"

namespace te_flax::cpu {
namespace {
#include "cpu/kernels.inc"
}  // namespace

const Kernels kAvx2Kernels = Table("avx2");

}  // namespace te_flax::cpu
