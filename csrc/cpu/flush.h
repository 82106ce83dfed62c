// The float mode of the kernels that compute.
#ifndef TE_FLAX_CPU_FLUSH_H_
#define TE_FLAX_CPU_FLUSH_H_

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace te_flax::cpu {
namespace {

// While it lives: round to nearest, exceptions masked, FTZ and DAZ, whatever the caller uses.
// Elsewhere than on x86 the kernels flush only what they store.
class FlushMode {
#if defined(__x86_64__)
 public:
  FlushMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~FlushMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  FlushMode() {}
#endif
};

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_FLUSH_H_
