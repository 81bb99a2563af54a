// How many threads a step that is under way may use from now on: kvmesh::follow_threads names the place where another process
// says so, and attention looks there once a layer. Between two layers no thread is at work but the one that computes the step.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

// Those of the OpenMP that torch runs on, which is loaded with it.
extern "C" void omp_set_num_threads(int) __attribute__((weak));
extern "C" int omp_get_max_threads() __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::atomic<int64_t>* allowed = nullptr;  // 0: as many as the step began with
std::atomic<int64_t>* used = nullptr;

bool can_follow() { return omp_set_num_threads != nullptr && omp_get_max_threads != nullptr; }

// Both int64 [1], in memory that outlives every step. Returns whether it will be done.
bool follow_threads(Tensor allowed_threads, Tensor used_threads) {
  if (allowed_threads.scalar_type() != ScalarType::Long || used_threads.scalar_type() != ScalarType::Long)
    throw std::runtime_error("kvmesh::follow_threads: it is for int64");
  if (!can_follow()) return false;
  new Tensor(allowed_threads), new Tensor(used_threads);  // kept for ever: nobody says which step is the last
  allowed = static_cast<std::atomic<int64_t>*>(allowed_threads.data_ptr());
  used = static_cast<std::atomic<int64_t>*>(used_threads.data_ptr());
  return true;
}

}  // namespace

// On the thread that computes the step.
void adapt_threads() {
  if (allowed == nullptr) return;
  const int64_t number = allowed->load();
  if (number <= 0 || number == omp_get_max_threads()) return;
  const int64_t before = used->load();
  if (number > before) used->store(number);
  omp_set_num_threads(static_cast<int>(number));
  if (number < before) used->store(number);
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvmesh, library) {
  library.def("follow_threads(Tensor allowed, Tensor used) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(kvmesh, CPU, library) { library.impl("follow_threads", TORCH_BOX(&follow_threads)); }
