#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace te_flax::cpu {
namespace {

// The tables that this CPU runs, best first.
std::vector<const Kernels*> Supported() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) tables.push_back(&kAvx512Kernels);
  if (avx2) tables.push_back(&kAvx2Kernels);
#endif
  tables.push_back(&kBaseKernels);
  return tables;
}

const Kernels& Choose() {
  const std::vector<const Kernels*> supported = Supported();
  const char* value = std::getenv("TE_FLAX_SIMD");
  const std::string wanted = value == nullptr || *value == '\0' ? "auto" : value;
  if (wanted == "auto") return *supported.front();
  std::string allowed = "auto";
  for (const Kernels* table : supported) {
    if (wanted == table->name) return *table;
    allowed.append(", ").append(table->name);
  }
  throw std::invalid_argument("te_flax: TE_FLAX_SIMD must be one of " + allowed +
                              " on this CPU, got '" + wanted + "'; unset it for the best one");
}

}  // namespace

const Kernels& Active() {
  static const Kernels& active = Choose();
  return active;
}

}  // namespace te_flax::cpu
