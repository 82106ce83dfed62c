#include "cpu/dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) tables.push_back(&kAvx512Kernels);
  if (avx2) tables.push_back(&kAvx2Kernels);
#endif
  tables.push_back(&kBaseKernels);
  return tables;
}

const Kernels* Find(const std::string& wanted, const std::string& where,
                    const std::string& remedy) {
  const std::vector<const Kernels*> supported = Supported();
  if (wanted == "auto") return supported.front();
  std::string allowed = "auto";
  for (const Kernels* table : supported) {
    if (wanted == table->name) return table;
    allowed.append(", ").append(table->name);
  }
  throw std::invalid_argument(where + " must be one of " + allowed + " on this CPU, got '" +
                              wanted + "'; " + remedy);
}

TestSettings& MutableTesting() {
  static TestSettings settings;
  return settings;
}

}  // namespace

const Kernels& Active() {
  static const Kernels* const active = [] {
    const char* value = std::getenv("TE_FLAX_SIMD");
    const std::string wanted = value == nullptr || *value == '\0' ? "auto" : value;
    return Find(wanted, "te_flax: TE_FLAX_SIMD", "unset it for the best one");
  }();
  return *active;
}

const TestSettings& Testing() { return MutableTesting(); }

void SetTesting(const std::string& simd, int threads, bool ieee) {
  TestSettings settings;
  if (simd != "auto") settings.kernels = Find(simd, "testing: simd", "name one of these");
  settings.threads = threads;
  settings.ieee = ieee;
  MutableTesting() = settings;
}

TestingFloatMode::TestingFloatMode() {
#if defined(__x86_64__)
  constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
  if (Testing().ieee) {
    saved_ = _mm_getcsr();
    changed_ = true;
    _mm_setcsr(saved_ & ~kFlush);
  }
#endif
}

TestingFloatMode::~TestingFloatMode() {
#if defined(__x86_64__)
  if (changed_) _mm_setcsr(saved_);
#endif
}

}  // namespace te_flax::cpu
