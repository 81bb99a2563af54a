// A compiled package, run without Python's lock: torch's own binding holds it for the whole step, in which the process then
// answers nobody and moves no KV. Methods of a torch class are called without it.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Package : torch::CustomClassHolder {
  explicit Package(const std::string& path) : loader(path) {}

  // Names of the weights that it was made without.
  std::vector<std::string> weights() { return loader.get_constant_fqns(); }

  // Have it read `tensors`, which the caller keeps alive.
  void use(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
    std::unordered_map<std::string, at::Tensor> weights;
    for (size_t i = 0; i < names.size(); ++i) weights.emplace(names[i], tensors.at(i));
    loader.load_constants(weights, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return loader.run(inputs); }

  torch::inductor::AOTIModelPackageLoader loader;
};

}  // namespace

TORCH_LIBRARY(kvmesh_package, library) {
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("weights", &Package::weights)
      .def("use", &Package::use)
      .def("run", &Package::run);
}
