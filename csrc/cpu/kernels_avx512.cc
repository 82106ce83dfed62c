#include "cpu/kernels.h"

namespace te_flax::cpu {
namespace {
#include "cpu/kernels.inc"
}  // namespace

const Kernels kAvx512Kernels = Table("avx512");

}  // namespace te_flax::cpu
