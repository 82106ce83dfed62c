// Chooses the kernel table for the running CPU.
#ifndef TE_FLAX_CPU_DISPATCH_H_
#define TE_FLAX_CPU_DISPATCH_H_

#include <string>

#include "cpu/kernels.h"

namespace te_flax::cpu {

// The best table that this CPU runs, or the one that TE_FLAX_SIMD names. Decided once. A value
// of TE_FLAX_SIMD that is unknown or that this CPU does not run throws std::invalid_argument;
// te_flax/ops/_extension.py asks before it registers any handler, so that no handler throws.
const Kernels& Active();

// How tests run the handlers (te_flax._C.testing): with another table than Active(), another
// number of threads than the pool's, and on threads that honour subnormals as IEEE 754 says.
// The results must not depend on any of them.
struct TestSettings {
  const Kernels* kernels = nullptr;  // null: Active()
  int threads = 0;                   // 0: the pool's
  bool ieee = false;
};

const TestSettings& Testing();

// Changes the settings of the process. `simd` is a level or "auto". Not while a handler runs.
void SetTesting(const std::string& simd, int threads, bool ieee);

// The table that the handlers use.
inline const Kernels& Table() {
  return Testing().kernels != nullptr ? *Testing().kernels : Active();
}

// While it lives, the calling thread has FTZ and DAZ off if the test settings say so.
class TestingFloatMode {
 public:
  TestingFloatMode();
  ~TestingFloatMode();
  TestingFloatMode(const TestingFloatMode&) = delete;
  TestingFloatMode& operator=(const TestingFloatMode&) = delete;

 private:
  unsigned saved_ = 0;
  bool changed_ = false;
};

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_DISPATCH_H_
