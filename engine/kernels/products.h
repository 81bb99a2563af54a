// The products of attention, queries times keys and weights times values, with the best instructions of each processor. A row's
// sums have the same order whether it is multiplied alone or with others, and whether keys and values are packed or in place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int64_t ROWS = 16;       // keys that are packed at a time; a page has a multiple of this
constexpr int64_t KEY_BLOCK = 64;  // keys that queries are multiplied by at a time

// The operands of the products: single numbers, or pairs of bfloat16 if the processor can multiply these.
struct Singles {
  typedef float Left;   // queries, weights
  typedef float Right;  // keys, values of a prompt tile
  static constexpr int64_t TOGETHER = 1;
};
#ifdef __AVX512BF16__
struct Pairs {
  typedef Bf16 Left;
  typedef uint32_t Right;
  static constexpr int64_t TOGETHER = 2;
};
template <typename T>
using Products = std::conditional_t<std::is_same_v<T, Bf16>, Pairs, Singles>;
#else
template <typename T>
using Products = Singles;
#endif

// A page is too short for the processor's own prefetching.
template <typename T>
inline void prefetch(const T* rows, int64_t count) {
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(rows) + byte, 0, 2);
}

// rows[g] += weights[g * KEY_BLOCK + i] * value row i for i in [from, to), for GROUP query rows and WIDTH vectors of each value row:
// the sums that `multiply` computes with values packed by `put_values`, but with values in place.
template <int GROUP, int WIDTH, typename T>
inline void add_values(const float* weights, const T* values, int64_t from, int64_t to, int64_t dim, float* rows, int64_t width) {
  Lanes sums[GROUP][WIDTH];
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < WIDTH; ++w) sums[g][w] = load(rows + g * width + w * LANES);
  for (int64_t i = from; i < to; ++i) {
    for (int w = 0; w < WIDTH; ++w) {
      const Lanes value = load(values + i * dim + w * LANES);
      for (int g = 0; g < GROUP; ++g) sums[g][w] += weights[g * KEY_BLOCK + i] * value;
    }
  }
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < WIDTH; ++w) save(rows + g * width + w * LANES, sums[g][w]);
}

#ifdef __AVX512BF16__

// Two rows at a time. A row that is not in [from, to) counts as zeros, because it may have another request's data, even NaN.
template <int GROUP, int WIDTH>
inline void add_values(const Bf16* weights, const Bf16* values, int64_t from, int64_t to, int64_t dim, float* rows, int64_t width) {
  static_assert(WIDTH == 1 || WIDTH % 2 == 0);
  constexpr int BLOCKS = (WIDTH + 1) / 2;  // of 32 numbers
  constexpr __mmask32 MASK = WIDTH == 1 ? 0xffff : 0xffffffff;
  // the first and the last four of each 8 numbers, which is the order of the products of two interleaved rows
  const __m512i firsts = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  const __m512i lasts = _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  const __m512i in_order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i behind = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  __m512 low[GROUP][BLOCKS], high[GROUP][BLOCKS];
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < BLOCKS; ++w) {
      const float* start = rows + g * width + 2 * w * LANES;
      const __m512 left = _mm512_loadu_ps(start), right = WIDTH > 1 ? _mm512_loadu_ps(start + LANES) : _mm512_setzero_ps();
      low[g][w] = _mm512_permutex2var_ps(left, firsts, right);
      high[g][w] = _mm512_permutex2var_ps(left, lasts, right);
    }
  for (int64_t i = from / 2 * 2; i < to; i += 2) {
    const __mmask32 first = i >= from ? MASK : 0, second = i + 1 < to ? MASK : 0;
    for (int w = 0; w < BLOCKS; ++w) {
      const __m512i a = _mm512_maskz_loadu_epi16(first, values + i * dim + 2 * w * LANES);
      const __m512i b = _mm512_maskz_loadu_epi16(second, values + (i + 1) * dim + 2 * w * LANES);
      const __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(a, b), upper = (__m512bh)_mm512_unpackhi_epi16(a, b);
      for (int g = 0; g < GROUP; ++g) {
        int32_t pair;
        std::memcpy(&pair, weights + g * KEY_BLOCK + i, sizeof pair);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
        low[g][w] = _mm512_dpbf16_ps(low[g][w], weight, lower);
        high[g][w] = _mm512_dpbf16_ps(high[g][w], weight, upper);
      }
    }
  }
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < BLOCKS; ++w) {
      float* end = rows + g * width + 2 * w * LANES;
      _mm512_storeu_ps(end, _mm512_permutex2var_ps(low[g][w], in_order, high[g][w]));
      if constexpr (WIDTH > 1) _mm512_storeu_ps(end + LANES, _mm512_permutex2var_ps(low[g][w], behind, high[g][w]));
    }
}

#endif

template <int GROUP, typename L, typename T>
inline void add_rows(const L* weights, const T* values, int64_t from, int64_t to, int64_t dim, float* rows, int64_t width) {
  int64_t d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) add_values<GROUP, WIDE>(weights, values + d, from, to, dim, rows + d, width);
  for (; d < dim; d += LANES) add_values<GROUP, 1>(weights, values + d, from, to, dim, rows + d, width);
}

// Calls f with the number of query rows, up to four at a time, as a constant.
template <typename F>
inline void by_rows(int64_t group, const F& f) {
  for (int64_t g = 0; g < group; g += 4) switch (group - g) {
      case 1: f(g, std::integral_constant<int, 1>()); break;
      case 2: f(g, std::integral_constant<int, 2>()); break;
      case 3: f(g, std::integral_constant<int, 3>()); break;
      default: f(g, std::integral_constant<int, 4>());
    }
}

// c [ROWS, WIDTH * LANES] (+)= a [ROWS, depth] x b [depth, WIDTH * LANES], the tile in registers.
template <int ROWS, int WIDTH>
inline void multiply_tile(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, bool add) {
  Lanes sums[ROWS][WIDTH];
  for (int i = 0; i < ROWS; ++i)
    for (int w = 0; w < WIDTH; ++w) sums[i][w] = add ? load(c + i * ldc + w * LANES) : Lanes{};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes row[WIDTH];
    for (int w = 0; w < WIDTH; ++w) row[w] = load(b + k * ldb + w * LANES);
    for (int i = 0; i < ROWS; ++i)
      for (int w = 0; w < WIDTH; ++w) sums[i][w] += a[i * lda + k] * row[w];
  }
  for (int i = 0; i < ROWS; ++i)
    for (int w = 0; w < WIDTH; ++w) save(c + i * ldc + w * LANES, sums[i][w]);
}

#ifdef __AVX512BF16__
// The same as multiply_tile, for pairs of bfloat16: a [ROWS, 2 * pairs], b [pairs, WIDTH * LANES] of two numbers each.
template <int ROWS, int WIDTH>
inline void multiply_tile(float* c, int64_t ldc, const Bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t pairs, bool add) {
  __m512 sums[ROWS][WIDTH];
  for (int i = 0; i < ROWS; ++i)
    for (int w = 0; w < WIDTH; ++w) sums[i][w] = add ? _mm512_loadu_ps(c + i * ldc + w * LANES) : _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh row[WIDTH];
    for (int w = 0; w < WIDTH; ++w) row[w] = (__m512bh)_mm512_loadu_si512(b + k * ldb + w * LANES);
    for (int i = 0; i < ROWS; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * lda + 2 * k, sizeof pair);
      for (int w = 0; w < WIDTH; ++w) sums[i][w] = _mm512_dpbf16_ps(sums[i][w], (__m512bh)_mm512_set1_epi32(pair), row[w]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int w = 0; w < WIDTH; ++w) _mm512_storeu_ps(c + i * ldc + w * LANES, sums[i][w]);
}
#endif

// ROWS rows of a product. With few rows, more columns at a time, because each sum waits for the previous one.
template <int ROWS, typename A, typename B>
inline void multiply_rows(float* c, int64_t ldc, const A* a, int64_t lda, const B* b, int64_t ldb, int64_t width, int64_t depth, bool add) {
  constexpr int MANY = ROWS <= FEW ? 4 : 2;
  int64_t column = 0;
  for (; column + MANY * LANES <= width; column += MANY * LANES)
    multiply_tile<ROWS, MANY>(c + column, ldc, a, lda, b + column, ldb, depth, add);
  for (; column < width; column += 2 * LANES) multiply_tile<ROWS, 2>(c + column, ldc, a, lda, b + column, ldb, depth, add);
}

// c [rows, width] (+)= a [rows, depth] x b [depth, width]; width is a multiple of 2 * LANES. A row's sums do not depend on
// the other rows.
template <typename A, typename B>
void multiply(float* c, int64_t ldc, const A* a, int64_t lda, const B* b, int64_t ldb, int64_t rows, int64_t width, int64_t depth, bool add) {
  int64_t i = 0;
  for (; i + TILE <= rows; i += TILE) multiply_rows<TILE>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, width, depth, add);
  by_rows(rows - i, [&](int64_t g, auto count) {
    multiply_rows<count()>(c + (i + g) * ldc, ldc, a + (i + g) * lda, lda, b, ldb, width, depth, add);
  });
}

// The same by tiles, if the processor has them.
template <typename A, typename B>
void multiply([[maybe_unused]] Tiles* tiles, float* c, int64_t ldc, const A* a, int64_t lda, const B* b, int64_t ldb, int64_t rows, int64_t width, int64_t depth, bool add) {
#ifdef HAS_TILES
  if (tiles != nullptr) {
    for (int64_t i = 0; i < rows; i += Tiles::ROWS) {
      tiles->set_rows(std::min(Tiles::ROWS, rows - i));
      for (int64_t column = 0; column < width; column += Tiles::COLUMNS) {
        float* sums = c + i * ldc + column;
        if (add) tiles->load(sums, ldc);
        else tiles->clear();
        tiles->add(a + i * lda, lda, b + column, ldb, depth, [](int64_t) {});
        tiles->save(sums, ldc);
      }
    }
    return;
  }
#endif
  multiply(c, ldc, a, lda, b, ldb, rows, width, depth, add);
}

// Transposes LANES vectors of as many 32-bit numbers.
#ifdef __AVX512F__
inline void transpose(__m512i* v) {
  __m512i two[16], four[16];
  for (int i = 0; i < 16; i += 2) {
    two[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    two[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // four[i + c]: columns c, 4 + c, 8 + c and 12 + c of rows i to i + 3
    four[i] = _mm512_unpacklo_epi64(two[i], two[i + 2]);
    four[i + 1] = _mm512_unpackhi_epi64(two[i], two[i + 2]);
    four[i + 2] = _mm512_unpacklo_epi64(two[i + 1], two[i + 3]);
    four[i + 3] = _mm512_unpackhi_epi64(two[i + 1], two[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even = _mm512_shuffle_i32x4(four[c], four[4 + c], 0x88), odd = _mm512_shuffle_i32x4(four[c], four[4 + c], 0xdd);
    const __m512i even_2 = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], 0x88);
    const __m512i odd_2 = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], 0xdd);
    v[c] = _mm512_shuffle_i32x4(even, even_2, 0x88);
    v[4 + c] = _mm512_shuffle_i32x4(odd, odd_2, 0x88);
    v[8 + c] = _mm512_shuffle_i32x4(even, even_2, 0xdd);
    v[12 + c] = _mm512_shuffle_i32x4(odd, odd_2, 0xdd);
  }
}

inline void transpose(Lanes* v) { transpose(reinterpret_cast<__m512i*>(v)); }
#elif defined(__AVX2__)
inline void transpose(Lanes* v) {
  __m256 two[8], four[8];
  for (int i = 0; i < 8; i += 2) {
    two[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    two[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // four[i + c]: columns c and 4 + c of rows i to i + 3
    four[i] = _mm256_shuffle_ps(two[i], two[i + 2], 0x44);
    four[i + 1] = _mm256_shuffle_ps(two[i], two[i + 2], 0xee);
    four[i + 2] = _mm256_shuffle_ps(two[i + 1], two[i + 3], 0x44);
    four[i + 3] = _mm256_shuffle_ps(two[i + 1], two[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(four[c], four[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(four[c], four[4 + c], 0x31);
  }
}
#else
inline void transpose(Lanes* v) {
  for (int64_t i = 0; i < LANES; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float number = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = number;
    }
}
#endif

// Packs ROWS rows of keys as columns of [dim / TOGETHER, KEY_BLOCK], from column j.
template <typename T>
inline void put_keys(float* keys, int64_t j, const T* rows, int64_t dim) {
  for (int64_t i = 0; i < ROWS; i += LANES)
    for (int64_t d = 0; d < dim; d += LANES) {
      Lanes v[LANES];
      for (int64_t row = 0; row < LANES; ++row) v[row] = load(rows + (i + row) * dim + d);
      transpose(v);
      for (int64_t column = 0; column < LANES; ++column) save(keys + (d + column) * KEY_BLOCK + j + i, v[column]);
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Pairs are transposed and then widened, which needs half of the shuffles.
inline void put_keys(float* keys, int64_t j, const Bf16* rows, int64_t dim) {
  for (int64_t i = 0; i < ROWS; i += LANES)
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
      Lanes v[LANES];
#pragma GCC unroll 8  // in a loop, they would be copied through memory, and read before they are written
      for (int64_t row = 0; row < LANES; ++row)
        v[row] = reinterpret_cast<Lanes>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + (i + row) * dim + d)));
      transpose(v);
#pragma GCC unroll 8
      for (int64_t pair = 0; pair < LANES; ++pair) {
        const __m256i both = reinterpret_cast<__m256i>(v[pair]);
        float* column = keys + (d + 2 * pair) * KEY_BLOCK + j + i;
        save(column, reinterpret_cast<Lanes>(_mm256_slli_epi32(both, 16)));
        save(column + KEY_BLOCK, reinterpret_cast<Lanes>(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000))));
      }
    }
}
#endif

#ifdef __AVX512BF16__
inline void put_keys(uint32_t* keys, int64_t j, const Bf16* rows, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 2 * ROWS) {
    const int64_t pairs = std::min<int64_t>(ROWS, (dim - d) / 2);
    __m512i v[ROWS];
    for (int i = 0; i < ROWS; ++i) v[i] = _mm512_maskz_loadu_epi32((1 << pairs) - 1, rows + i * dim + d);
    transpose(v);
    for (int64_t p = 0; p < pairs; ++p) _mm512_storeu_si512(keys + (d / 2 + p) * KEY_BLOCK + j, v[p]);
  }
}
#endif

// Packs ROWS rows of values as rows of [KEY_BLOCK / TOGETHER, wide], from row j. Rows that are not in [from, to) become zeros,
// because they may have another request's data, even NaN.
template <typename T>
inline void put_values(float* values, int64_t j, const T* rows, int64_t from, int64_t to, int64_t dim, int64_t wide) {
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t d = 0; d < dim; ++d) values[(j + i) * wide + d] = i >= from && i < to ? widen(rows[i * dim + d]) : 0.0f;
}
#ifdef __AVX512BF16__
inline void put_values(uint32_t* values, int64_t j, const Bf16* rows, int64_t from, int64_t to, int64_t dim, int64_t wide) {
  const auto numbers = [&](int64_t i, int64_t d) {
    if (i < from || i >= to) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i * dim + d)));
  };
  for (int64_t i = 0; i < ROWS; i += 2)
    for (int64_t d = 0; d < dim; d += 16)
      _mm512_storeu_si512(values + (j + i) / 2 * wide + d, _mm512_or_si512(numbers(i, d), _mm512_slli_epi32(numbers(i + 1, d), 16)));
}
#endif

#ifdef HAS_TILES
// Packs the queries of a decode as pairs, [group / Tiles::HALF, dim / 2, Tiles::HALF]. A column without a query is zero.
void pair_queries(const Bf16* queries, int64_t group, int64_t dim, uint32_t* pairs) {
  std::fill(pairs, pairs + (group + Tiles::HALF - 1) / Tiles::HALF * Tiles::HALF * dim / 2, 0);
  for (int64_t g = 0; g < group; ++g)
    for (int64_t p = 0; p < dim / 2; ++p)
      std::memcpy(pairs + (g / Tiles::HALF * dim / 2 + p) * Tiles::HALF + g % Tiles::HALF, queries + g * dim + 2 * p, sizeof *pairs);
}

// Computes scores[g * KEY_BLOCK + i] of ROWS keys, in place.
inline void score_keys(Tiles& tiles, const Bf16* keys, const uint32_t* pairs, int64_t group, int64_t dim, float* scores) {
  static_assert(ROWS == Tiles::HALF);
  alignas(64) float sums[ROWS][Tiles::HALF];
  for (int64_t first = 0; first < group; first += Tiles::HALF, pairs += dim / 2 * Tiles::HALF) {
    tiles.score(keys, dim, pairs, dim / 2, sums[0]);
    __m512i columns[ROWS];
    for (int i = 0; i < ROWS; ++i) columns[i] = _mm512_load_si512(sums[i]);
    transpose(columns);
    for (int64_t g = first; g < std::min(group, first + Tiles::HALF); ++g)
      _mm512_storeu_si512(scores + g * KEY_BLOCK, columns[g - first]);
  }
}
#endif

}  // namespace
