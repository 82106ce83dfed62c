// FP6 codes alone: encode, decode, pack, unpack. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_FP6_CODES_CUH_
#define TE_FLAX_CUDA_KERNELS_FP6_CODES_CUH_

#include "cuda/kernels/amax.cuh"
#include "cuda/kernels/fp6.cuh"

namespace te_flax::cuda {

// One code in a byte. `aligned`: 16-byte loads of x, 8-byte stores of codes.
template <Float dtype>
__global__ void __launch_bounds__(kFlatThreads)
    Fp6EncodeKernel(const void* __restrict__ x, int64_t n, Format format, bool aligned,
                    uint8_t* codes) {
  const float power = PowerOf2(-Fp8Shift(format));
  WalkFlat<dtype>(x, n, aligned, [&](int64_t index, int valid, const Pack<dtype>& pack) {
    float v[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), power);
    const uint2 fp8 = Encode8(v, Fp8Of(format));
    const uint2 found = make_uint2(Fp6OfFp8(fp8.x, true), Fp6OfFp8(fp8.y, true));
    if (valid > 0) StoreCodes(codes + index, found, valid, aligned);
  });
}

__global__ void __launch_bounds__(kFlatThreads)
    Fp6DecodeKernel(const uint8_t* __restrict__ codes, int64_t n, Format format, bool aligned,
                    float* x) {
  const int64_t step = int64_t{gridDim.x} * kFlatThreads * kPack;
  int64_t i = (int64_t{blockIdx.x} * kFlatThreads + threadIdx.x) * kPack;
  for (; i < n; i += step) {
    const int valid = static_cast<int>(n - i < kPack ? n - i : kPack);
    float v[kPack];
    DecodeFp6(LoadCodes(codes + i, valid, aligned), format, v);
    StoreValues<Float::kF32>(x, i, v, valid, aligned);
  }
}

// codes [rows, cols] to data [rows, packs of 8, 6 bytes], the last pack of a row perhaps half.
// `aligned`: cols is a multiple of 8, and so are both addresses.
__global__ void __launch_bounds__(kFlatThreads)
    Fp6PackKernel(const uint8_t* __restrict__ codes, int64_t rows, int64_t cols, bool aligned,
                  uint8_t* data) {
  const int64_t packs = (cols + kPack - 1) / kPack;
  const int64_t stride = (cols + kFp6Group - 1) / kFp6Group * kFp6Bytes;
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t p = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; p < rows * packs; p += step) {
    const int64_t r = p / packs, c = p % packs * kPack;
    const int valid = static_cast<int>(cols - c < kPack ? cols - c : kPack);
    const uint2 bits = JoinEight(LoadCodes(codes + r * cols + c, valid, aligned));
    StoreFp6(data + r * stride + c / kFp6Group * kFp6Bytes, bits, valid, aligned);
  }
}

// data [n / 4, 3] to n codes.
__global__ void __launch_bounds__(kFlatThreads)
    Fp6UnpackKernel(const uint8_t* __restrict__ data, int64_t n, bool aligned, uint8_t* codes) {
  const int64_t step = int64_t{gridDim.x} * kFlatThreads * kPack;
  int64_t i = (int64_t{blockIdx.x} * kFlatThreads + threadIdx.x) * kPack;
  for (; i < n; i += step) {
    const int valid = static_cast<int>(n - i < kPack ? n - i : kPack);
    const uint2 bits = LoadFp6(data + i / kFp6Group * kFp6Bytes, valid, aligned);
    StoreCodes(codes + i, SplitEight(bits), valid, aligned);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_FP6_CODES_CUH_
