// How many threads a step that is under way may use from now on: kvmesh::follow_threads names the place where another process
// says so, and attention looks there once a layer. Between two layers no thread is at work but the one that computes the step.
//
// And where these threads run: with kvmesh::keep_apart, on a core each while there are as many threads as cores. A step has
// hundreds of barriers, at which a thread sleeps and is woken. The kernel often wakes it on the core of another thread and
// leaves a core idle for milliseconds.

#include <sched.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Those of the OpenMP that torch runs on, which is loaded with it.
extern "C" void omp_set_num_threads(int) __attribute__((weak));
extern "C" int omp_get_max_threads() __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Of the thread that computes steps: a compiled package is tried on another one.
thread_local std::atomic<int64_t>* allowed = nullptr;  // 0: as many as the step began with
thread_local std::atomic<int64_t>* used = nullptr;

bool can_follow() { return omp_set_num_threads != nullptr && omp_get_max_threads != nullptr; }

// For steps of the calling thread. Both int64 [1], in memory that outlives every step. Returns whether it will be done.
bool follow_threads(Tensor allowed_threads, Tensor used_threads) {
  if (allowed_threads.scalar_type() != ScalarType::Long || used_threads.scalar_type() != ScalarType::Long)
    throw std::runtime_error("kvmesh::follow_threads: it is for int64");
  if (!can_follow()) return false;
  new Tensor(allowed_threads), new Tensor(used_threads);  // kept for ever: nobody says which step is the last
  allowed = static_cast<std::atomic<int64_t>*>(allowed_threads.data_ptr());
  used = static_cast<std::atomic<int64_t>*>(used_threads.data_ptr());
  return true;
}

thread_local std::vector<int64_t> cores;  // for this thread's team, one each; empty: the kernel chooses
thread_local int64_t placed_threads = 0;  // number for which the team was placed; 0: never

void keep_apart(Tensor own_cores) {
  if (own_cores.scalar_type() != ScalarType::Long) throw std::runtime_error("kvmesh::keep_apart: it is for int64");
  const auto* numbers = static_cast<const int64_t*>(own_cores.data_ptr());
  cores.assign(numbers, numbers + own_cores.numel());
}

// Allows the calling thread `some` cores only. A refusal costs speed, nothing else.
void run_on(const int64_t* some, int64_t count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int64_t i = 0; i < count; ++i) CPU_SET(some[i], &set);  // beyond CPU_SETSIZE it does nothing
  sched_setaffinity(0, sizeof set, &set);
}

// A new thread of a team inherits the core of the thread that makes it, so all are placed whenever their number changes.
void place_threads(int64_t number) {
  const int64_t all = cores.size();
  if (all < 2 || number == placed_threads) return;
  placed_threads = number;
  const int64_t* own = cores.data();
  if (number == all)
    torch::stable::parallel_for(0, number, 1, [own](int64_t first, int64_t last) { run_on(own + first, last - first); });
  else
    run_on(own, all);
}

}  // namespace

// On the thread that computes the step.
void adapt_threads() {
  if (allowed != nullptr) {
    const int64_t number = allowed->load(), before = used->load();
    if (number > 0 && number != omp_get_max_threads()) {
      if (number > before) used->store(number);
      omp_set_num_threads(static_cast<int>(number));
      if (number < before) used->store(number);
    }
  }
  place_threads(torch::stable::get_num_threads());
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvmesh, library) {
  library.def("follow_threads(Tensor allowed, Tensor used) -> bool");
  library.def("keep_apart(Tensor cores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvmesh, CPU, library) {
  library.impl("follow_threads", TORCH_BOX(&follow_threads));
  library.impl("keep_apart", TORCH_BOX(&keep_apart));
}
