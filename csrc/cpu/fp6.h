// FP6 codes and the groups of four in three bytes, the first code in the lowest bits.
#ifndef TE_FLAX_CPU_FP6_H_
#define TE_FLAX_CPU_FP6_H_

#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

constexpr int kFp6Group = 4;  // codes
constexpr int kFp6Bytes = 3;  // that they take

inline uint32_t LoadFp6Group(const uint8_t* bytes) {
  return bytes[0] | static_cast<uint32_t>(bytes[1]) << 8 | static_cast<uint32_t>(bytes[2]) << 16;
}

inline void StoreFp6Group(uint8_t* bytes, uint32_t word) {
  bytes[0] = static_cast<uint8_t>(word);
  bytes[1] = static_cast<uint8_t>(word >> 8);
  bytes[2] = static_cast<uint8_t>(word >> 16);
}

// Of the first n codes, 0 to 63; those missing count as 0.
inline uint32_t JoinFp6(const uint8_t* codes, int64_t n = kFp6Group) {
  uint32_t word = 0;
  for (int j = 0; j < kFp6Group && j < n; ++j) word |= (codes[j] & 63u) << 6 * j;
  return word;
}

// float32 bits of a code, of which the lower six bits count.
template <Format format>
inline uint32_t DecodeFp6(uint32_t code) {
  return DecodeMagnitude<format>(code & 31) | (code & 32) << 26;
}

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_FP6_H_
