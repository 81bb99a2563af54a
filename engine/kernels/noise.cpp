// Finds tokens whose random bits are small: kvmesh::small_words. The bits are those of engine/sampling/noise.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr uint32_t SPREAD = 0x9E3779B9, LEFT = 0x7FEB352D, RIGHT = 0x846CA68B;
constexpr int64_t BLOCK = 256;  // tokens that are checked at once; few blocks have a small word

inline uint32_t finalised(uint32_t word) {
  word = (word ^ word >> 16) * LEFT;
  word = (word ^ word >> 15) * RIGHT;
  return word ^ word >> 16;
}

// Writes the tokens whose words are at most `most`, ascending, to the front of `ids`, int64 [vocab]. Returns their number.
int64_t small_words(Tensor ids, int64_t low, int64_t high, int64_t most) {
  if (ids.scalar_type() != ScalarType::Long) throw std::runtime_error("kvmesh::small_words: ids must be int64");
  auto* const found = static_cast<int64_t*>(ids.data_ptr());
  const auto first_key = static_cast<uint32_t>(low), second_key = static_cast<uint32_t>(high), bound = static_cast<uint32_t>(most);
  int64_t count = 0;
  for (int64_t first = 0; first < ids.numel(); first += BLOCK) {
    const auto length = static_cast<uint32_t>(std::min(BLOCK, ids.numel() - first));
    uint32_t words[BLOCK];
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < length; ++i) {
      const uint32_t word = finalised(finalised((static_cast<uint32_t>(first) + i) * SPREAD + first_key) + second_key);
      words[i] = word;
      least = word < least ? word : least;
    }
    if (least > bound) continue;
    for (uint32_t i = 0; i < length; ++i)
      if (words[i] <= bound) found[count++] = first + i;
  }
  return count;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvmesh, library) {
  library.def("small_words(Tensor(a!) ids, int low, int high, int most) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(kvmesh, CPU, library) { library.impl("small_words", TORCH_BOX(&small_words)); }
