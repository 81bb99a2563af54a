// Products of bfloat16 by AMX, for kernels whose rows must not depend on each other. A tile multiplies 16 rows of 32 numbers
// by 16 columns. A row's sums have the same order for any other rows, but not the order of other instructions.

#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)  // a hypervisor may hide either of them
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Returns whether Linux permits tiles. A process must request the permission once; threads inherit it.
inline bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return may;
}

// The tiles of this thread, after set_rows: sums [rows, COLUMNS] in 0 to 3, left rows in 4 and 5, pairs in 6 and 7.
// Up to HALF rows do not need 2, 3 and 5, which then have all their rows, for `score`.
class Tiles {
 public:
  static constexpr int64_t ROWS = 32;     // maximum number at a time
  static constexpr int64_t COLUMNS = 32;  // at a time
  static constexpr int64_t PAIRS = 16;    // pairs of numbers k and k + 1 of all columns; a depth is a multiple of this
  static constexpr int64_t HALF = 16;     // rows and columns of one tile

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (rows_ > 0) _tile_release();  // otherwise each context switch saves 8 kB
  }

  void set_rows(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shape;
    const auto upper = static_cast<uint8_t>(std::min(rows, HALF));
    const auto lower = static_cast<uint8_t>(rows > HALF ? rows - HALF : HALF);
    for (const int tile : {0, 1, 4}) shape.rows[tile] = upper;
    for (const int tile : {2, 3, 5}) shape.rows[tile] = lower;
    for (const int tile : {6, 7}) shape.rows[tile] = PAIRS;
    _tile_loadconfig(&shape);
  }

  void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void load(const float* sums, int64_t stride) {
    _tile_loadd(0, sums, stride * 4);
    _tile_loadd(1, sums + HALF, stride * 4);
    if (rows_ <= HALF) return;
    _tile_loadd(2, sums + HALF * stride, stride * 4);
    _tile_loadd(3, sums + HALF * stride + HALF, stride * 4);
  }

  void save(float* sums, int64_t stride) const {
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + HALF, stride * 4);
    if (rows_ <= HALF) return;
    _tile_stored(2, sums + HALF * stride, stride * 4);
    _tile_stored(3, sums + HALF * stride + HALF, stride * 4);
  }

  // Sums += left [rows, 2 * pairs] x right [pairs, COLUMNS] of two numbers each. Strides are in numbers for left, in pairs for
  // right. Calls `meanwhile` with the first pair of each step.
  template <typename F>
  void add(const void* left, int64_t left_stride, const void* right, int64_t right_stride, int64_t pairs, const F& meanwhile) {
    const auto* a = static_cast<const uint32_t*>(left);
    const auto* b = static_cast<const uint32_t*>(right);
    for (int64_t k = 0; k < pairs; k += PAIRS, a += PAIRS, b += PAIRS * right_stride) {
      meanwhile(k);
      _tile_loadd(4, a, left_stride * 2);
      _tile_loadd(6, b, right_stride * 4);
      _tile_loadd(7, b + HALF, right_stride * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (rows_ <= HALF) continue;
      _tile_loadd(5, a + HALF * left_stride / 2, left_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // scores [HALF, HALF] = keys [HALF, 2 * pairs] x queries [pairs, HALF] of two numbers each. The bits are those of `add` with
  // keys and queries exchanged, but keys need not be transposed.
  void score(const void* keys, int64_t stride, const uint32_t* queries, int64_t pairs, float* scores) {
    const auto* rows = static_cast<const uint32_t*>(keys);
    _tile_zero(2);
    for (int64_t k = 0; k < pairs; k += PAIRS) {
      _tile_loadd(5, rows + k, stride * 2);
      _tile_loadd(6, queries + k * HALF, HALF * 4);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(2, scores, HALF * 4);
  }

 private:
  int64_t rows_ = 0;
};

#else

inline bool may_use_tiles() { return false; }

class Tiles {
 public:
  static constexpr int64_t ROWS = 32, PAIRS = 16;
};

#endif
