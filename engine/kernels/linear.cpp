// Linear layers in bfloat16 over weights packed for the processor's dot product: kvmesh::linear, and kvmesh::gated_linear
// for the first half of a gated MLP, silu(x gate) * (x up), whose gate never goes through memory, and kvmesh::logits, whose
// results stay fp32: rounded to bfloat16, the two most probable tokens are often equal.
//
// A decode step reads each weight once for a few tokens. What oneDNN, which torch calls, then spends around each product is
// as long as the product itself; here a step of 1 or 8 tokens takes two thirds of its time, one of 256 as long.
// Of a row's result every term is added in the same order however many rows there are.

#ifdef __AVX512BF16__

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t PANEL = 32;        // columns of a panel: two vectors of pairs
constexpr int64_t TILE = 12;         // rows at a time: with a panel's columns they fill the registers
constexpr int64_t FEW = 16;          // rows that leave a product waiting for weights
constexpr int64_t AHEAD = 4096 / 2;  // numbers of a panel to ask for before they are needed

inline void store(uint16_t* to, __m512 numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline void store(float* to, __m512 numbers) { _mm512_storeu_ps(to, numbers); }

// x / (1 + e^-x), through e^-|x|, which does not overflow; Cephes' polynomial, as in attention.cpp.
inline __m512 silu(__m512 x) {
  const __m512 y = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)), _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = _mm512_scalef_ps(_mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), one), n);
  const __m512 above = _mm512_div_ps(x, _mm512_add_ps(one, e));
  return _mm512_mask_mul_ps(above, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), above, e);
}

// What to ask of memory during a pass over a panel: `pace` numbers from `start` on for each pair.
struct Ahead {
  const uint16_t* start;
  int64_t pace;
};

// c [ROWS, PANEL] = a [ROWS, 2 * pairs] x one panel [pairs, PANEL, 2]; of a GATED panel, whose halves are gate and up,
// c [ROWS, PANEL / 2].
template <int ROWS, bool GATED, typename C>
inline void multiply(const uint16_t* a, int64_t lda, const uint16_t* panel, int64_t pairs, Ahead ahead, C* c, int64_t ldc) {
  __m512 left[ROWS], right[ROWS];
  for (int i = 0; i < ROWS; ++i) left[i] = right[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, panel += 2 * PANEL) {
    const __m512bh w_left = (__m512bh)_mm512_loadu_si512(panel), w_right = (__m512bh)_mm512_loadu_si512(panel + PANEL);
    __builtin_prefetch(ahead.start + k * ahead.pace);
    __builtin_prefetch(ahead.start + k * ahead.pace + PANEL);
    for (int i = 0; i < ROWS; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * lda + 2 * k, sizeof pair);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      left[i] = _mm512_dpbf16_ps(left[i], x, w_left);
      right[i] = _mm512_dpbf16_ps(right[i], x, w_right);
    }
  }
  for (int i = 0; i < ROWS; ++i) {
    if constexpr (GATED) {
      store(c + i * ldc, _mm512_mul_ps(silu(left[i]), right[i]));
    } else {
      store(c + i * ldc, left[i]);
      store(c + i * ldc + PANEL / 2, right[i]);
    }
  }
}

// The same for a number of rows, at most ROWS, that is known only now.
template <int ROWS, bool GATED, typename C>
void multiply_some(int64_t rows, const uint16_t* a, int64_t lda, const uint16_t* panel, int64_t pairs, Ahead ahead, C* c, int64_t ldc) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply<ROWS, GATED>(a, lda, panel, pairs, ahead, c, ldc);
    multiply_some<ROWS - 1, GATED>(rows, a, lda, panel, pairs, ahead, c, ldc);
  }
}

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("kvmesh::linear: ") + what);
}

// x [..., in] and weights packed as [panels, in / 2, PANEL, 2] to [..., out], where a panel makes PANEL columns, or half as
// many when it is GATED.
template <bool GATED, typename C>
Tensor multiply_all(const Tensor& x, const Tensor& packed) {
  require(x.scalar_type() == ScalarType::BFloat16 && packed.scalar_type() == ScalarType::BFloat16, "it is for bfloat16");
  require(x.is_contiguous() && packed.is_contiguous() && packed.dim() == 4, "x and packed must be contiguous");
  constexpr int64_t COLUMNS = GATED ? PANEL / 2 : PANEL;
  const int64_t in = packed.size(1) * 2, panels = packed.size(0), out_size = panels * COLUMNS;
  require(packed.size(2) == PANEL && packed.size(3) == 2 && x.size(x.dim() - 1) == in, "the weights are of another size");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_size;
  Tensor out = torch::stable::new_empty(x, shape, std::is_same_v<C, float> ? ScalarType::Float : ScalarType::BFloat16);
  const auto* a = static_cast<const uint16_t*>(x.data_ptr());
  const auto* weights = static_cast<const uint16_t*>(packed.data_ptr());
  auto* c = static_cast<C*>(out.data_ptr());
  const int64_t rows = x.numel() / in;
  // as many panels at once as make the threads' turns few and yet even
  const int64_t turn = rows > FEW ? 1 : std::clamp<int64_t>(panels / 8, 1, 8), turns = (panels + turn - 1) / turn;
  // A single pass waits for this panel's weights. Of several, all but the first find them in the cache and would leave
  // memory idle: each asks for its share of the next panel.
  const int64_t passes = std::max<int64_t>(1, (rows + TILE - 1) / TILE);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t t = next++; t < turns; t = next++)
      for (int64_t p = t * turn; p < std::min(panels, (t + 1) * turn); ++p) {
        const uint16_t* panel = weights + p * in * PANEL;
        C* columns = c + p * COLUMNS;
        Ahead ahead{passes == 1 ? panel + AHEAD : panel + in * PANEL, 2 * PANEL / passes};
        int64_t i = 0;
        for (; i + TILE <= rows; i += TILE, ahead.start += ahead.pace * in / 2)
          multiply<TILE, GATED>(a + i * in, in, panel, in / 2, ahead, columns + i * out_size, out_size);
        multiply_some<TILE - 1, GATED>(rows - i, a + i * in, in, panel, in / 2, ahead, columns + i * out_size, out_size);
      }
  };
  torch::stable::parallel_for(0, std::min<int64_t>(torch::stable::get_num_threads(), turns), 1, work);
  return out;
}

Tensor linear(Tensor x, Tensor packed) { return multiply_all<false, uint16_t>(x, packed); }

Tensor gated_linear(Tensor x, Tensor packed) { return multiply_all<true, uint16_t>(x, packed); }

Tensor logits(Tensor x, Tensor packed) { return multiply_all<false, float>(x, packed); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvmesh, library) {
  library.def("linear(Tensor x, Tensor packed) -> Tensor");
  library.def("gated_linear(Tensor x, Tensor packed) -> Tensor");
  library.def("logits(Tensor x, Tensor packed) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvmesh, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("gated_linear", TORCH_BOX(&gated_linear));
  library.impl("logits", TORCH_BOX(&logits));
}

#endif
