// Linear layers in bfloat16, with weights packed in the order in which they are read: kvmesh::linear; kvmesh::gated_linear
// for the first half of a gated MLP, silu(x gate) * (x up), which keeps the gate in registers; and kvmesh::logits, with fp32
// results, because rounded to bfloat16 the two most probable tokens are often equal.
//
// A decode step reads each weight once for a few tokens. torch calls oneDNN, whose overhead per product takes as long as the
// product. Here a step of 1 or 8 tokens takes two thirds of oneDNN's time, and one of 256 the same time (docs/decisions/004).
// With AMX, tiles multiply any number of rows (docs/decisions/028). Without a dot product for bfloat16 (AVX2, older AVX-512),
// oneDNN is slow for prompts as well; here numbers are widened in registers. The terms of a result are added in the same order
// for any number of rows.

#if defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__))

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tiles.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t PANEL = 32;        // columns
constexpr int64_t FEW = 16;          // up to this many rows, memory limits a product; with tiles up to one pass
constexpr int64_t LINE = 64 / 2;     // numbers of a cache line
constexpr int64_t AHEAD = 4096 / 2;  // numbers of a panel that are prefetched before they are needed

#ifdef __AVX512BF16__
constexpr int64_t LANES = 16;      // numbers of a vector
constexpr int64_t REGISTERS = 24;  // registers for sums
constexpr int64_t TILE = 12;       // rows at a time; with a panel's columns, or half of them, they fill the registers
using Factor = uint16_t;           // element type of x in products
#else
constexpr int64_t LANES = 8;
constexpr int64_t REGISTERS = 10;  // four more hold the weights of a whole panel
constexpr int64_t TILE = 6;
using Factor = float;
#endif
constexpr int64_t VECTORS = PANEL / LANES;

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef int32_t Whole __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// Returns number k of a row of a tile, which is [ROWS, in] like x. Without a dot product a tile is [in, ROWS], so that the
// factors of a step are at fixed distances: a product of eight rows then takes a tenth less time.
template <int ROWS>
inline const Factor* factor(const Factor* tile, [[maybe_unused]] int64_t in, int64_t k, int row) {
#ifdef __AVX512BF16__
  return tile + row * in + k;
#else
  return tile + k * ROWS + row;
#endif
}

// sums += numbers k and k + 1 of each row of a tile times those of WIDTH vectors of columns, [WIDTH * LANES, 2].
template <int ROWS, int WIDTH>
inline void add(Vector (&sums)[ROWS][WIDTH], const Factor* tile, int64_t in, int64_t k, const uint16_t* pairs) {
#ifdef __AVX512BF16__
  __m512bh w[WIDTH];
  for (int v = 0; v < WIDTH; ++v) w[v] = (__m512bh)_mm512_loadu_si512(pairs + v * 2 * LANES);
  for (int i = 0; i < ROWS; ++i) {
    int32_t both;
    std::memcpy(&both, factor<ROWS>(tile, in, k, i), sizeof both);
    for (int v = 0; v < WIDTH; ++v) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], (__m512bh)_mm512_set1_epi32(both), w[v]);
  }
#else
  for (int which = 0; which < 2; ++which) {
    Vector w[WIDTH];
    for (int v = 0; v < WIDTH; ++v) {
      Bits both;  // a bfloat16 is the upper half of a float
      std::memcpy(&both, pairs + v * 2 * LANES, sizeof both);
      w[v] = reinterpret_cast<Vector>(which ? both & 0xffff0000u : both << 16);
    }
    // intrinsics, because a compiler that may reorder sums emits three instructions instead of two
    for (int i = 0; i < ROWS; ++i) {
      const Vector x = _mm256_broadcast_ss(factor<ROWS>(tile, in, k + which, i));
      for (int v = 0; v < WIDTH; ++v) sums[i][v] = _mm256_fmadd_ps(w[v], x, sums[i][v]);
    }
  }
#endif
}

inline void store(float* to, Vector numbers) { std::memcpy(to, &numbers, sizeof numbers); }

inline void store(uint16_t* to, Vector numbers) {  // rounds to nearest, ties to even
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(numbers));
#else
  const Bits bits = reinterpret_cast<Bits>(numbers);
  const Bits rounded = numbers == numbers ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : Bits{} + 0x7fc0;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

// x / (1 + e^-x), by e^-|x|, which does not overflow; Cephes' polynomial, as in numbers.h.
inline Vector silu(Vector x) {
  const Vector zero{}, below = x < zero ? x : -x, y = below > -87.0f ? below : zero - 87.0f;
  const Whole n = __builtin_convertvector(y * 1.44269504088896341f - 0.5f, Whole);
  const Vector whole = __builtin_convertvector(n, Vector);
  const Vector r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vector p = zero + 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + factor;
  const Vector e = (p * r * r + r + 1.0f) * reinterpret_cast<Vector>((n + 127) << 23);
  const Vector above = x / (1.0f + e);
  return x < zero ? above * e : above;
}

// The prefetches during a pass over a panel: `pace` numbers for each pair, beginning at `start`.
struct Ahead {
  const uint16_t* start;
  int64_t pace;
};

// c [ROWS, PANEL] = ROWS rows of x times one panel [in / 2, PANEL, 2]. A GATED panel has columns of gate and of up; c is then
// [ROWS, PANEL / 2].
template <int ROWS, bool GATED, typename C>
inline void multiply(const Factor* tile, int64_t in, const uint16_t* panel, Ahead ahead, C* c, int64_t ldc) {
  constexpr int WIDTH = ROWS * VECTORS <= REGISTERS ? VECTORS : VECTORS / 2;
  Vector sums[ROWS][VECTORS];
  for (int first = 0; first < VECTORS; first += WIDTH) {
    Vector some[ROWS][WIDTH] = {};
    for (int64_t k = 0; k < in / 2; ++k) {
      if (first == 0) {
        __builtin_prefetch(ahead.start + k * ahead.pace);
        __builtin_prefetch(ahead.start + k * ahead.pace + PANEL);
      }
      add(some, tile, in, 2 * k, panel + k * 2 * PANEL + first * 2 * LANES);
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < WIDTH; ++v) sums[i][first + v] = some[i][v];
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < (GATED ? VECTORS / 2 : VECTORS); ++v)
      store(c + i * ldc + v * LANES, GATED ? silu(sums[i][v]) * sums[i][v + VECTORS / 2] : sums[i][v]);
}

// The same for a number of rows, at most ROWS, that is not known at compile time.
template <int ROWS, bool GATED, typename C>
void multiply_some(int64_t rows, const Factor* tile, int64_t in, const uint16_t* panel, Ahead ahead, C* c, int64_t ldc) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply<ROWS, GATED>(tile, in, panel, ahead, c, ldc);
    multiply_some<ROWS - 1, GATED>(rows, tile, in, panel, ahead, c, ldc);
  }
}

#ifdef HAS_TILES
// The same by tiles, for at most Tiles::ROWS rows of x.
template <bool GATED, typename C>
void multiply(Tiles& tiles, int64_t rows, const uint16_t* x, int64_t in, const uint16_t* panel, Ahead ahead, C* c, int64_t ldc) {
  alignas(64) float sums[Tiles::ROWS][PANEL];
  tiles.set_rows(rows);
  tiles.clear();
  tiles.add(x, in, panel, PANEL, in / 2, [&](int64_t pair) {
    const uint16_t* next = ahead.start + pair * ahead.pace;
    for (int64_t i = 0; i < Tiles::PAIRS * ahead.pace; i += LINE) __builtin_prefetch(next + i, 0, 2);
  });
  tiles.save(sums[0], PANEL);
  for (int64_t i = 0; i < rows; ++i) {
    Vector left, right;
    std::memcpy(&left, sums[i], sizeof left);
    std::memcpy(&right, sums[i] + LANES, sizeof right);
    store(c + i * ldc, GATED ? silu(left) * right : left);
    if (!GATED) store(c + i * ldc + LANES, right);
  }
}
#endif

// Calls work(0) to work(turns - 1) on torch's threads.
template <typename Work>
void share(int64_t turns, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t, int64_t) {
    for (int64_t t = next++; t < turns; t = next++) work(t);
  };
  torch::stable::parallel_for(0, std::min<int64_t>(torch::stable::get_num_threads(), turns), 1, take);
}

#ifdef __AVX512BF16__
const Factor* factors(const uint16_t* x, int64_t, int64_t, std::unique_ptr<float[]>&) { return x; }
#else
// Converts a tile of x, [rows, in], for products: [in, rows] in fp32.
template <int ROWS>
void widen(int64_t rows, const uint16_t* x, int64_t in, float* tile) {
  if (rows < ROWS) return widen<std::max(ROWS - 1, 1)>(rows, x, in, tile);
  for (int64_t k = 0; k < in; ++k)
    for (int i = 0; i < ROWS; ++i) {
      const uint32_t bits = static_cast<uint32_t>(x[i * in + k]) << 16;
      std::memcpy(tile + k * ROWS + i, &bits, sizeof bits);
    }
}

// Returns x [rows, in] in the form for products, tile by tile.
const Factor* factors(const uint16_t* x, int64_t rows, int64_t in, std::unique_ptr<float[]>& memory) {
  memory.reset(new float[rows * in]);
  const auto widen_tile = [&](int64_t t) {
    const int64_t first = t * TILE;
    widen<TILE>(std::min(TILE, rows - first), x + first * in, in, &memory[first * in]);
  };
  const int64_t tiles = (rows + TILE - 1) / TILE;
  if (rows > FEW) share(tiles, widen_tile);
  else
    for (int64_t t = 0; t < tiles; ++t) widen_tile(t);
  return memory.get();
}
#endif

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("kvmesh::linear: ") + what);
}

// Multiplies x [..., in] by weights packed as [panels, in / 2, PANEL, 2]. Returns [..., out], where each panel gives PANEL
// columns, or half as many if it is GATED.
template <bool GATED, typename C>
Tensor multiply_all(const Tensor& x, const Tensor& packed) {
  require(x.scalar_type() == ScalarType::BFloat16 && packed.scalar_type() == ScalarType::BFloat16, "x and packed must be bfloat16");
  require(x.is_contiguous() && packed.is_contiguous() && packed.dim() == 4, "x and packed must be contiguous");
  constexpr int64_t COLUMNS = GATED ? PANEL / 2 : PANEL;
  const int64_t in = packed.size(1) * 2, panels = packed.size(0), out_size = panels * COLUMNS;
  require(packed.size(2) == PANEL && packed.size(3) == 2 && x.size(x.dim() - 1) == in, "sizes of x and packed do not match");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_size;
  Tensor out = torch::stable::new_empty(x, shape, std::is_same_v<C, float> ? ScalarType::Float : ScalarType::BFloat16);
  const int64_t rows = x.numel() / in;
  std::unique_ptr<float[]> wide;
  const Factor* a = factors(static_cast<const uint16_t*>(x.data_ptr()), rows, in, wide);
  const auto* weights = static_cast<const uint16_t*>(packed.data_ptr());
  auto* c = static_cast<C*>(out.data_ptr());
  const bool by_tiles = in % (2 * Tiles::PAIRS) == 0 && may_use_tiles();
  const int64_t rows_a_pass = by_tiles ? Tiles::ROWS : TILE, few = by_tiles ? Tiles::ROWS : FEW;
  const int64_t threads = torch::stable::get_num_threads();
  // several panels per turn, so that turns are few, but still evenly distributed over the threads
  const int64_t turn = rows > few ? 1 : std::clamp<int64_t>(panels / (4 * threads), 1, 8), turns = (panels + turn - 1) / turn;
  // A single pass waits for this panel's weights. With several passes, all but the first find them in the cache and would
  // leave memory idle, so each prefetches its share of the panel that this thread will probably take next.
  const int64_t passes = std::max<int64_t>(1, (rows + rows_a_pass - 1) / rows_a_pass);
  share(turns, [&](int64_t t) {
    for (int64_t p = t * turn; p < std::min(panels, (t + 1) * turn); ++p) {
      const uint16_t* panel = weights + p * in * PANEL;
      C* columns = c + p * COLUMNS;
      Ahead ahead{passes == 1 ? panel + AHEAD : panel + threads * in * PANEL, 2 * PANEL / passes};
#ifdef HAS_TILES
      if (by_tiles) {
        Tiles tiles;
        for (int64_t i = 0; i < rows; i += Tiles::ROWS, ahead.start += ahead.pace * in / 2)
          multiply<GATED>(tiles, std::min(Tiles::ROWS, rows - i), a + i * in, in, panel, ahead, columns + i * out_size, out_size);
        continue;
      }
#endif
      int64_t i = 0;
      for (; i + TILE <= rows; i += TILE, ahead.start += ahead.pace * in / 2)
        multiply<TILE, GATED>(a + i * in, in, panel, ahead, columns + i * out_size, out_size);
      multiply_some<TILE - 1, GATED>(rows - i, a + i * in, in, panel, ahead, columns + i * out_size, out_size);
    }
  });
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
