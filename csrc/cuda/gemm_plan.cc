#include "cuda/gemm_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/gemm_cache.h"
#include "cuda/gemm_operation.h"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

namespace lt = ::te_flax::cublaslt;

constexpr std::string_view kWhere = "gemm";
constexpr int kCandidates = 16;
constexpr int kRounds = 3;
constexpr float kRoundMs = 0.5f;  // a candidate runs this long in each round, at least once
constexpr int kMaxRepeats = 20;

struct Plan {
  lt::Algo algo;
  bool final;  // not to be timed any more
};

// What the process knows. A chosen algorithm serves all devices of a name, so that they agree.
struct State {
  std::mutex mutex;     // of the members below
  std::mutex settling;  // held while candidates run: one device times, the others wait
  bool autotune = true;
  std::string file;
  bool read = false;
  AlgoTable stored;
  std::unordered_map<std::string, Plan> plans;
  // Of each device the keys whose final algorithm has run there: its kernel is loaded.
  std::unordered_map<int, std::unordered_set<std::string>> settled;
  std::unordered_map<int, std::string> names;  // of devices
};

State& Global() {
  static auto* state = new State;
  return *state;
}

void Warn(const std::string& text) {
  if (!text.empty()) std::fprintf(stderr, "te_flax: gemm: %s\n", text.c_str());
}

// The library, the current device's handle and its part of the key.
struct Device {
  const lt::Api* api = nullptr;
  lt::Handle handle = nullptr;
  int ordinal = 0;
  std::string name;
};

ffi::ErrorOr<Device> CurrentDevice() {
  TE_ASSIGN_OR_RETURN(api, LoadCublasLt());
  int ordinal = 0;
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetDevice(&ordinal)));
  TE_ASSIGN_OR_RETURN(handle, CublasLtHandle(*api, ordinal));
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::string& name = state.names[ordinal];
  if (name.empty()) {
    cudaDeviceProp properties;
    TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetDeviceProperties(&properties, ordinal)));
    name = std::string(properties.name) + "/" + std::to_string(api->GetVersion()) + "/";
    std::replace(name.begin(), name.end(), ' ', '_');
  }
  return Device{api, handle, ordinal, name};
}

bool Find(const std::string& key, Plan* plan) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto known = state.plans.find(key);
  if (known == state.plans.end()) return false;
  *plan = known->second;
  return true;
}

// A choice that is not final gives way to any that another device has made meanwhile.
void Keep(const std::string& key, const lt::Algo& algo, bool final) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (final) {
    state.plans[key] = Plan{algo, true};
  } else {
    state.plans.emplace(key, Plan{algo, false});
  }
}

// Whether a device has made this choice for all.
bool FindFinal(const std::string& key, lt::Algo* algo) {
  Plan plan;
  if (!Find(key, &plan) || !plan.final) return false;
  *algo = plan.algo;
  return true;
}

bool IsSettledOn(const Device& device, const std::string& key) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto known = state.settled.find(device.ordinal);
  return known != state.settled.end() && known->second.count(key) != 0;
}

// Keeps a final choice, with which nothing is left to do on this device.
void SettleOn(const Device& device, const std::string& key, const lt::Algo& algo) {
  Keep(key, algo, true);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.settled[device.ordinal].insert(key);
}

// The algorithm that the cache file holds.
bool FindStored(const std::string& key, lt::Algo* algo) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.read && !state.file.empty()) {
    std::string warning;
    state.stored = ReadAlgos(state.file, &warning);
    Warn(warning);
  }
  state.read = true;
  const auto known = state.stored.find(key);
  if (known == state.stored.end()) return false;
  std::copy(known->second.begin(), known->second.end(), algo->data);
  return true;
}

void Store(const std::string& key, const lt::Algo& algo) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.file.empty()) return;
  AlgoWords words;
  std::copy(std::begin(algo.data), std::end(algo.data), words.begin());
  const std::string why = AddAlgo(state.file, key, words);
  if (why.empty()) return;
  Warn(why + "; algorithms are timed again in every process");
  state.file.clear();
}

ffi::Error NoAlgorithm(const Matmul& p, const Device& device) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "gemm: cuBLASLt must have an algorithm, got none for " + device.name + p.Key() +
                        "; use te.kernels('gemm=reference')");
}

ffi::ErrorOr<lt::Algo> First(Operation* operation, const Matmul& p, const Device& device) {
  TE_ASSIGN_OR_RETURN(found, operation->Candidates(device.handle, 1));
  if (found.empty()) return ffi::Unexpected(NoAlgorithm(p, device));
  return found[0];
}

struct Events {
  cudaEvent_t begin = nullptr, end = nullptr;
  ~Events() {
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
};

// Milliseconds of one of `repeats` runs; infinity where the library refuses.
ffi::Error Time(Operation* operation, const Device& device, const MatmulBuffers& at,
                const lt::Algo& algo, int repeats, const Events& events, cudaStream_t stream,
                float* ms) {
  *ms = std::numeric_limits<float>::infinity();
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventRecord(events.begin, stream)));
  for (int i = 0; i < repeats; ++i) {
    if (operation->Run(device.handle, at, algo, stream) != lt::kSuccess) {
      return ffi::Error::Success();
    }
  }
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventRecord(events.end, stream)));
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventSynchronize(events.end)));
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventElapsedTime(ms, events.begin, events.end)));
  *ms /= static_cast<float>(repeats);
  return ffi::Error::Success();
}

// The index of the fastest candidate, or -1 where none runs.
ffi::ErrorOr<int> Fastest(Operation* operation, const Device& device, const MatmulBuffers& at,
                          const std::vector<lt::Algo>& found, cudaStream_t stream) {
  Events events;
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventCreate(&events.begin)));
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaEventCreate(&events.end)));
  std::vector<float> best(found.size(), std::numeric_limits<float>::infinity());
  std::vector<int> repeats(found.size(), 1);
  const int rounds = found.size() > 1 ? kRounds : 0;
  for (int round = 0; round <= rounds; ++round) {  // round 0 warms up
    for (size_t i = 0; i < found.size(); ++i) {
      if (repeats[i] == 0) continue;
      float ms = 0;
      TE_RETURN_IF_ERROR(Time(operation, device, at, found[i], repeats[i], events, stream, &ms));
      best[i] = std::min(best[i], ms);
      if (round > 0) continue;
      if (ms == std::numeric_limits<float>::infinity()) {
        repeats[i] = 0;
      } else {
        repeats[i] = std::clamp(static_cast<int>(kRoundMs / std::max(ms, 1e-3f)), 1, kMaxRepeats);
      }
    }
  }
  const auto least = std::min_element(best.begin(), best.end());
  if (least == best.end() || *least == std::numeric_limits<float>::infinity()) return -1;
  return static_cast<int>(least - best.begin());
}

}  // namespace

std::string Matmul::Key() const {
  std::string key;
  for (const int64_t word : {m, n, k}) key += std::to_string(word) + "x";
  key.back() = '/';
  key += trans_a ? "t" : "n";
  key += trans_b ? "t" : "n";
  for (const int word :
       {static_cast<int>(a), static_cast<int>(b), static_cast<int>(d), static_cast<int>(bias),
        a_scale, b_scale, static_cast<int>(fast), static_cast<int>(epilogue)}) {
    key += "/" + std::to_string(word);
  }
  return key;
}

void ConfigureGemm(bool autotune, std::string cache_file) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.autotune = autotune;
  state.file = std::move(cache_file);
  state.read = false;
  state.stored.clear();
  state.plans.clear();
  state.settled.clear();
}

ffi::ErrorOr<bool> IsSettled(const Matmul& matmul, cudaStream_t stream) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  if (IsSettledOn(device, device.name + matmul.Key())) return true;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaStreamIsCapturing(stream, &capture)));
  return capture != cudaStreamCaptureStatusNone;
}

ffi::Error Settle(const Matmul& matmul, const MatmulBuffers& scratch, cudaStream_t stream) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  const std::string key = device.name + matmul.Key();
  const std::lock_guard<std::mutex> one(Global().settling);
  if (IsSettledOn(device, key)) return ffi::Error::Success();
  Operation operation(*device.api);
  TE_RETURN_IF_ERROR(operation.Init(matmul, scratch));
  const bool timed = Global().autotune;
  lt::Algo chosen = {};
  const bool known = FindFinal(key, &chosen) ||
                     (timed && FindStored(key, &chosen) && operation.Runs(device.handle, chosen));
  std::vector<lt::Algo> candidates = {chosen};
  if (!known) {
    TE_ASSIGN_OR_RETURN(found, operation.Candidates(device.handle, timed ? kCandidates : 1));
    candidates = found;
  }
  TE_ASSIGN_OR_RETURN(best, Fastest(&operation, device, scratch, candidates, stream));
  if (best < 0) return NoAlgorithm(matmul, device);
  const lt::Algo& algo = candidates[static_cast<size_t>(best)];
  SettleOn(device, key, algo);
  if (timed && !known) Store(key, algo);
  return ffi::Error::Success();
}

ffi::Error SettleUntimed(const Matmul& matmul, const MatmulBuffers& buffers) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  const std::string key = device.name + matmul.Key();
  const std::lock_guard<std::mutex> one(Global().settling);
  lt::Algo chosen = {};
  if (!FindFinal(key, &chosen)) {
    Operation operation(*device.api);
    TE_RETURN_IF_ERROR(operation.Init(matmul, buffers));
    TE_ASSIGN_OR_RETURN(first, First(&operation, matmul, device));
    chosen = first;
  }
  SettleOn(device, key, chosen);
  return ffi::Error::Success();
}

ffi::Error RunMatmul(const Matmul& matmul, const MatmulBuffers& buffers, cudaStream_t stream) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  const std::string key = device.name + matmul.Key();
  Operation operation(*device.api);
  TE_RETURN_IF_ERROR(operation.Init(matmul, buffers));
  Plan plan;
  if (!Find(key, &plan)) {
    TE_ASSIGN_OR_RETURN(first, First(&operation, matmul, device));
    plan.algo = first;
    Keep(key, first, false);
  }
  return CublasLtStatus(*device.api, "Matmul",
                        operation.Run(device.handle, buffers, plan.algo, stream));
}

}  // namespace te_flax::cuda
