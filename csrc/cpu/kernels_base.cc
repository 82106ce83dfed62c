#include "cpu/kernels.h"

namespace te_flax::cpu {
namespace {
#include "cpu/kernels.inc"
}  // namespace

const Kernels kBaseKernels = Table("base");

}  // namespace te_flax::cpu
