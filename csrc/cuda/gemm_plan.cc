#include "cuda/gemm_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/gemm_cache.h"
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
  return Device{api, handle, name};
}

// cuBLASLt's descriptors of one product.
class Operation {
 public:
  explicit Operation(const lt::Api& api) : api_(api) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (desc_ != nullptr) api_.DescDestroy(desc_);
    for (lt::Layout layout : {a_, b_, d_}) {
      if (layout != nullptr) api_.LayoutDestroy(layout);
    }
  }

  ffi::Error Init(const Matmul& p, const MatmulBuffers& at) {
    TE_RETURN_IF_ERROR(
        Check("MatmulDescCreate", api_.DescCreate(&desc_, lt::kComputeF32, CUDA_R_32F)));
    TE_RETURN_IF_ERROR(Set(lt::kTransA, p.trans_a ? lt::kOpT : lt::kOpN));
    TE_RETURN_IF_ERROR(Set(lt::kTransB, p.trans_b ? lt::kOpT : lt::kOpN));
    if (p.fast) TE_RETURN_IF_ERROR(Set(lt::kFastAccum, int8_t{1}));
    if (p.a_scale != kUnscaled) {
      TE_RETURN_IF_ERROR(SetScale(lt::kAScaleMode, lt::kAScalePointer, p.a_scale, at.a_scale));
      TE_RETURN_IF_ERROR(SetScale(lt::kBScaleMode, lt::kBScalePointer, p.b_scale, at.b_scale));
    }
    if (p.epilogue != lt::kEpilogueNone) TE_RETURN_IF_ERROR(SetEpilogue(p, at));
    TE_RETURN_IF_ERROR(Create(&a_, p.a, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k));
    TE_RETURN_IF_ERROR(Create(&b_, p.b, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n));
    return Create(&d_, p.d, p.m, p.n);
  }

  // At most `count` candidates, the most promising first.
  ffi::ErrorOr<std::vector<lt::Algo>> Candidates(lt::Handle handle, int count) {
    lt::Preference preference = nullptr;
    TE_RETURN_IF_ERROR(Check("MatmulPreferenceCreate", api_.PreferenceCreate(&preference)));
    const uint64_t bytes = kLibraryBytes;
    lt::Status status = api_.PreferenceSet(preference, lt::kMaxWorkspace, &bytes, sizeof(bytes));
    const auto set = [&](int attribute, uint32_t value) {
      if (status == lt::kSuccess) {
        status = api_.PreferenceSet(preference, attribute, &value, sizeof(value));
      }
    };
    // Partial sums in a narrower type of D would break the bound.
    set(lt::kReductionMask, lt::kReduceInComputeType);
    for (int i = lt::kMinAlignmentA; i <= lt::kMinAlignmentD; ++i) set(i, kPointerAlignment);
    std::vector<lt::HeuristicResult> found(static_cast<size_t>(count));
    int n = 0;
    if (status == lt::kSuccess) {
      status =
          api_.GetHeuristic(handle, desc_, a_, b_, d_, d_, preference, count, found.data(), &n);
    }
    api_.PreferenceDestroy(preference);
    TE_RETURN_IF_ERROR(Check("MatmulAlgoGetHeuristic", status));
    std::vector<lt::Algo> algos;
    for (int i = 0; i < n; ++i) {
      const lt::HeuristicResult& r = found[static_cast<size_t>(i)];
      if (r.state == lt::kSuccess && r.workspace <= size_t{kLibraryBytes}) algos.push_back(r.algo);
    }
    return algos;
  }

  bool Runs(lt::Handle handle, const lt::Algo& algo) {
    lt::HeuristicResult result;
    return api_.AlgoCheck(handle, desc_, a_, b_, d_, d_, &algo, &result) == lt::kSuccess &&
           result.workspace <= size_t{kLibraryBytes};
  }

  lt::Status Run(lt::Handle handle, const MatmulBuffers& at, const lt::Algo& algo,
                 cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    return api_.Matmul(handle, desc_, &one, at.a, a_, at.b, b_, &zero, at.d, d_, at.d, d_, &algo,
                       at.workspace, size_t{kLibraryBytes}, stream);
  }

 private:
  ffi::Error Check(std::string_view call, lt::Status status) {
    return CublasLtStatus(api_, call, status);
  }

  template <typename T>
  ffi::Error Set(int attribute, T value) {
    return Check("MatmulDescSetAttribute", api_.DescSet(desc_, attribute, &value, sizeof(value)));
  }

  ffi::Error SetScale(int mode, int pointer, int32_t scale, const void* values) {
    // Libraries before 12.8 have one mode and no attribute for it.
    if (scale != lt::kScaleTensor) TE_RETURN_IF_ERROR(Set(mode, scale));
    return Set(pointer, values);
  }

  ffi::Error SetEpilogue(const Matmul& p, const MatmulBuffers& at) {
    TE_RETURN_IF_ERROR(Set(lt::kEpilogue, p.epilogue));
    if (p.epilogue & lt::kEpilogueBias) {
      TE_RETURN_IF_ERROR(Set(lt::kBiasType, static_cast<int32_t>(p.bias)));
      TE_RETURN_IF_ERROR(Set(lt::kBiasPointer, at.bias));
    }
    if (p.epilogue & lt::kEpilogueAux) {
      TE_RETURN_IF_ERROR(Set(lt::kAuxPointer, at.aux));
      TE_RETURN_IF_ERROR(Set(lt::kAuxLd, p.m));
    }
    return ffi::Error::Success();
  }

  ffi::Error Create(lt::Layout* layout, cudaDataType type, int64_t rows, int64_t cols) {
    return Check("MatrixLayoutCreate", api_.LayoutCreate(layout, type, static_cast<uint64_t>(rows),
                                                         static_cast<uint64_t>(cols), rows));
  }

  const lt::Api& api_;
  lt::Desc desc_ = nullptr;
  lt::Layout a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

bool Find(const std::string& key, Plan* plan) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto known = state.plans.find(key);
  if (known == state.plans.end()) return false;
  *plan = known->second;
  return true;
}

void Keep(const std::string& key, const lt::Algo& algo, bool final) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.plans[key] = Plan{algo, final};
}

bool IsFinal(const std::string& key) {
  Plan plan;
  return Find(key, &plan) && plan.final;
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
}

ffi::ErrorOr<bool> IsSettled(const Matmul& matmul, cudaStream_t stream) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  if (IsFinal(device.name + matmul.Key())) return true;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaStreamIsCapturing(stream, &capture)));
  return capture != cudaStreamCaptureStatusNone;
}

ffi::Error Settle(const Matmul& matmul, const MatmulBuffers& scratch, cudaStream_t stream) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  const std::string key = device.name + matmul.Key();
  const std::lock_guard<std::mutex> one(Global().settling);
  if (IsFinal(key)) return ffi::Error::Success();
  Operation operation(*device.api);
  TE_RETURN_IF_ERROR(operation.Init(matmul, scratch));
  const bool timed = Global().autotune;
  lt::Algo stored = {};
  const bool known = timed && FindStored(key, &stored) && operation.Runs(device.handle, stored);
  std::vector<lt::Algo> candidates = {stored};
  if (!known) {
    TE_ASSIGN_OR_RETURN(found, operation.Candidates(device.handle, timed ? kCandidates : 1));
    candidates = found;
  }
  TE_ASSIGN_OR_RETURN(best, Fastest(&operation, device, scratch, candidates, stream));
  if (best < 0) return NoAlgorithm(matmul, device);
  const lt::Algo& algo = candidates[static_cast<size_t>(best)];
  Keep(key, algo, true);
  if (timed && !known) Store(key, algo);
  return ffi::Error::Success();
}

ffi::Error SettleUntimed(const Matmul& matmul, const MatmulBuffers& buffers) {
  TE_ASSIGN_OR_RETURN(device, CurrentDevice());
  Operation operation(*device.api);
  TE_RETURN_IF_ERROR(operation.Init(matmul, buffers));
  TE_ASSIGN_OR_RETURN(algo, First(&operation, matmul, device));
  Keep(device.name + matmul.Key(), algo, true);
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
