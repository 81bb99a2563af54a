// A compiled forward that runs without the GIL. torch's own binding holds the GIL for the whole step, during which the process
// could neither answer requests nor transfer KV. Methods of a torch class are called without it.
//
// The library is loaded from its own path. torch's loader would copy it to /tmp, including weights, and leave it there if the
// process is killed.

#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Package : torch::CustomClassHolder {
  explicit Package(const std::string& library) : runner(library) {}

  // Names of the weights that are not part of the package.
  std::vector<std::string> weights() {
    std::vector<std::string> names;
    for (const auto& [inner, name] : runner.getConstantNamesToOriginalFQNs()) names.push_back(name);
    return names;
  }

  // Use `tensors` as weights. The caller keeps them alive.
  void use(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
    std::unordered_map<std::string, at::Tensor> by_name, weights;
    for (size_t i = 0; i < names.size(); ++i) by_name.emplace(names[i], tensors.at(i));
    for (const auto& [inner, name] : runner.getConstantNamesToOriginalFQNs()) weights.emplace(inner, by_name.at(name));
    runner.update_constant_buffer(weights, /*use_inactive=*/false, /*validate_full_updates=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return runner.run(inputs); }

  torch::inductor::AOTIModelContainerRunnerCpu runner;
};

}  // namespace

TORCH_LIBRARY(kvmesh_package, library) {
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("weights", &Package::weights)
      .def("use", &Package::use)
      .def("run", &Package::run);
}
