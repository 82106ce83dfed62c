// Runs the pieces of one handler call on XLA's thread pool.
#ifndef TE_FLAX_CPU_PARALLEL_H_
#define TE_FLAX_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/ffi.h"
#include "cpu/dispatch.h"

namespace te_flax::cpu {

// A range of equal pieces [0, count), cut into contiguous tasks.
struct Pieces {
  int64_t count;
  int64_t task;  // pieces in a task
  int64_t Tasks() const { return (count + task - 1) / task; }
};

inline int64_t Threads(const ffi::ThreadPool& pool) {
  const int forced = Testing().threads;
  return forced > 0 ? forced : std::max<int64_t>(1, pool.num_threads());
}

// Cuts `count` pieces of some elements each so that every thread gets several tasks, but none so
// small that starting it costs as much as the work.
inline Pieces Cut(const ffi::ThreadPool& pool, int64_t count, int64_t elements) {
  constexpr int64_t kTasksPerThread = 8;
  constexpr int64_t kSmallestTask = 32 << 10;  // elements, about 10 us
  const int64_t tasks = Threads(pool) * kTasksPerThread;
  const int64_t smallest = kSmallestTask / std::max<int64_t>(1, elements);
  return {count, std::max({(count + tasks - 1) / tasks, smallest, int64_t{1}})};
}

// Calls fn(begin, end) for every task. The caller works too and waits for finished tasks only, so
// a busy pool cannot make it wait for one that never starts.
template <typename Fn>
void ParallelFor(ffi::ThreadPool& pool, const Pieces& pieces, const Fn& fn) {
  struct State {
    std::atomic<int64_t> next{0};
    int64_t finished = 0;
    std::mutex mutex;
    std::condition_variable all;
  };
  const int64_t tasks = pieces.Tasks();
  auto state = std::make_shared<State>();
  auto work = [state, tasks, &pieces, &fn] {
    int64_t done = 0;
    // `pieces` and `fn` live while a task is unfinished; a late worker gets none and touches none.
    for (int64_t i; (i = state->next.fetch_add(1)) < tasks; ++done) {
      const TestingFloatMode mode;
      fn(i * pieces.task, std::min(pieces.count, (i + 1) * pieces.task));
    }
    if (done == 0) return;
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->finished += done;
    if (state->finished == tasks) state->all.notify_one();
  };
  const int64_t helpers = std::min(Threads(pool), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all.wait(lock, [&] { return state->finished == tasks; });
}

// As above, joining the Amax of all tasks: a maximum, so the order does not matter.
template <typename Fn>
Amax ParallelAmax(ffi::ThreadPool& pool, const Pieces& pieces, const Fn& fn) {
  std::vector<Amax> parts(pieces.Tasks());
  ParallelFor(pool, pieces, [&](int64_t begin, int64_t end) {
    Amax part;  // on this thread's stack: neighbours in `parts` share cache lines
    fn(begin, end, &part);
    parts[begin / pieces.task] = part;
  });
  Amax all;
  for (const Amax& part : parts) {
    all.finite = std::max(all.finite, part.finite);
    all.nonfinite |= part.nonfinite;
  }
  return all;
}

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_PARALLEL_H_
