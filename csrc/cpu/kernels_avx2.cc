#include "cpu/kernels.h"

namespace te_flax::cpu {
namespace {

void QuantizeTensor(const TensorTile& tile, Amax* amax) {
  kBaseKernels.quantize_tensor(tile, amax);
}

void QuantizeMxfp8(const Mxfp8Tile& tile, Amax* amax) { kBaseKernels.quantize_mxfp8(tile, amax); }

}  // namespace

const Kernels kAvx2Kernels = {"avx2", ScalarAmax, QuantizeTensor, QuantizeMxfp8};

}  // namespace te_flax::cpu
