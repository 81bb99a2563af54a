// float32, bfloat16, float16 and 8-bit floats in vectors of the processor.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return static_cast<float>(x); }
inline float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, _Float16& out) { out = static_cast<_Float16>(x); }
inline void narrow(float x, Bf16& out) {  // rounds to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

template <typename T>
inline void narrow_all(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}
#ifdef __AVX512BF16__
inline void narrow_all(const float* from, int64_t count, Bf16* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 wanted = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
    _mm256_mask_storeu_epi16(to + i, wanted, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(wanted, from + i)));
  }
}
#endif

// 8-bit floats are e4m3: sign, 4 bits of exponent, 3 of mantissa; the largest is 448. They are rounded to nearest, ties to even,
// and saturate. NaN stays NaN, because a finite number in its place would hide that a request's results are wrong.
// Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
constexpr uint32_t BIAS = 127 - 7;       // added to the exponent of an 8-bit float, it makes that of a float32
constexpr uint32_t NOT_A_NUMBER = 0x7f;  // without the sign

inline float of_eight_bits(uint8_t x) {
  const uint32_t magnitude = x & 0x7f, bits = (magnitude << 20) + (BIAS << 23);
  float normal;
  std::memcpy(&normal, &bits, sizeof normal);
  const float finite = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : normal;
  const float value = magnitude == NOT_A_NUMBER ? NAN : finite;
  return x & 0x80 ? -value : value;
}

inline uint8_t to_eight_bits(float x) {
  const float magnitude = std::min(448.0f, std::fabs(x));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  const uint32_t normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (BIAS << 3);
  const uint32_t small = static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p9f));
  const uint32_t finite = magnitude < 0x1p-6f ? small : normal;
  return static_cast<uint8_t>((x == x ? finite : NOT_A_NUMBER) | (std::signbit(x) ? 0x80 : 0));
}

template <typename T>
inline void widen_all(const uint8_t* from, int64_t count, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) narrow(of_eight_bits(from[i]), to[i]);
}
#ifdef __AVX512BW__
inline void widen_all(const uint8_t* from, int64_t count, Bf16* to) {  // `count` is a multiple of 32
  // the bits of 0 to 7 times 2^-9
  const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  for (int64_t i = 0; i < count; i += 32) {
    const __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(BIAS << 7));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __mmask32 is_nan = _mm512_cmpeq_epu16_mask(magnitude, _mm512_set1_epi16(NOT_A_NUMBER));
    const __m512i finite = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small);
    const __m512i value = _mm512_mask_blend_epi16(is_nan, finite, _mm512_set1_epi16(0x7fc0));
    const __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(bits, magnitude), 8);
    _mm512_storeu_si512(to + i, _mm512_or_si512(value, sign));
  }
}
#endif

// A vector fills one register. A longer one would be kept in memory, so that each sum waits for the previous one.
#ifdef __AVX512F__
constexpr int64_t LANES = 16;
constexpr int TILE = 8;  // rows of a product whose sums fit into the 32 registers
constexpr int WIDE = 4;  // vectors of a value row that are added at a time, for four query rows
constexpr int FEW = 4;   // rows of a product whose sums for four vectors fit into the registers
constexpr bool KEYS_AHEAD = false;  // prefetch the next keys, not only values; not measured here
#else
constexpr int64_t LANES = 8;
constexpr int TILE = 6;  // with 16 registers
constexpr int WIDE = 2;
constexpr int FEW = 3;
constexpr bool KEYS_AHEAD = true;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
inline Lanes load(const _Float16* from) {
  _Float16 __attribute__((vector_size(2 * LANES))) narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, Lanes);
}
inline Lanes load(const Bf16* from) {
#ifdef __AVX512F__  // one instruction; gcc 12 compiles the general form to four
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Lanes>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#elif defined(__AVX2__)
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Lanes>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
#else
  uint16_t __attribute__((vector_size(2 * LANES))) narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
  return reinterpret_cast<Lanes>(__builtin_convertvector(narrow, Bits) << 16);
#endif
}
inline void save(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// e^x for x <= 0, in plain arithmetic that a compiler can vectorise; Cephes' polynomial, within 2 ulp.
inline float exp_of(float x) {
  const float n = std::nearbyint(std::max(x, -87.0f) * 1.44269504088896341f);
  const float r = (std::max(x, -87.0f) - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : p * scale;
}

}  // namespace
