// The number of threads of a running step: kvmesh::follow_threads sets the memory in which another process changes it.
// Attention reads it once per layer. Between two layers, only the thread that computes the step is active.
//
// The threads' cores: with kvmesh::keep_apart, each thread has its own core while there are as many threads as cores. A step
// has hundreds of barriers, at which threads sleep and are woken. The kernel often wakes a thread on the core of another one,
// and leaves a core idle for milliseconds.

#include <sched.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Functions of the OpenMP library that torch uses, which is loaded with it.
extern "C" void omp_set_num_threads(int) __attribute__((weak));
extern "C" int omp_get_max_threads() __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Set on the thread that computes steps only, because a compiled package is tried on another one.
thread_local std::atomic<int64_t>* allowed = nullptr;  // 0: the number with which the step began
thread_local std::atomic<int64_t>* used = nullptr;

bool can_follow() { return omp_set_num_threads != nullptr && omp_get_max_threads != nullptr; }

// Sets the cells for steps of the calling thread, int64 [1], in memory that outlives all steps. Returns whether it can.
bool follow_threads(Tensor allowed_threads, Tensor used_threads) {
  if (allowed_threads.scalar_type() != ScalarType::Long || used_threads.scalar_type() != ScalarType::Long)
    throw std::runtime_error("kvmesh::follow_threads: the tensors must be int64");
  if (!can_follow()) return false;
  new Tensor(allowed_threads), new Tensor(used_threads);  // never freed, because the last step is unknown
  allowed = static_cast<std::atomic<int64_t>*>(allowed_threads.data_ptr());
  used = static_cast<std::atomic<int64_t>*>(used_threads.data_ptr());
  return true;
}

thread_local std::vector<int64_t> cores;  // the cores of this thread's team; empty: the kernel chooses
thread_local int64_t placed_threads = 0;

void keep_apart(Tensor own_cores) {
  if (own_cores.scalar_type() != ScalarType::Long) throw std::runtime_error("kvmesh::keep_apart: the tensor must be int64");
  const auto* numbers = static_cast<const int64_t*>(own_cores.data_ptr());
  cores.assign(numbers, numbers + own_cores.numel());
}

// Binds the calling thread to `some` cores. A failure only costs speed.
void run_on(const int64_t* some, int64_t count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int64_t i = 0; i < count; ++i) CPU_SET(some[i], &set);  // no effect beyond CPU_SETSIZE
  sched_setaffinity(0, sizeof set, &set);
}

// A new thread of a team inherits the core of the thread that starts it, so all are placed whenever their number changes.
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

// Runs on the thread that computes the step.
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
