// Vectors of sixteen numbers, and what the kernels do with them.
//
// The types are GCC's and Clang's vector extensions, so that one source serves every
// instruction set: with AVX-512 a vector is a register, with AVX2 the compiler takes two.
// Only the product of bfloat16 pairs needs an intrinsic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TGI_INLINE inline __attribute__((always_inline))

namespace tgi {

using bf16 = uint16_t;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

TGI_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

TGI_INLINE float to_float(float x) { return x; }

// A float16 number.
TGI_INLINE float half_to_float(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  float magnitude = exponent ? std::ldexp(float(1024 + fraction), int(exponent) - 25) : std::ldexp(float(fraction), -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return half >> 15 ? -magnitude : magnitude;
#endif
}

// To the nearest, ties to even, as torch rounds; a NaN stays one.
TGI_INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TGI_INLINE f32x16 splat(float value) { return f32x16{} + value; }

#if defined(__AVX2__) && !defined(__AVX512F__)
// Half of a vector, which is in memory. GCC would copy whole ones 16 bytes at a time, and a load of 32 bytes waits
// for two such stores: rounding results took two thirds of its time for that.
TGI_INLINE __m256& half_of(f32x16& x, int half) { return reinterpret_cast<__m256*>(&x)[half]; }
#endif

TGI_INLINE f32x16 load(const float* from) {
  f32x16 x;
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int half = 0; half < 2; ++half) half_of(x, half) = _mm256_loadu_ps(from + 8 * half);
#else
  std::memcpy(&x, from, 64);
#endif
  return x;
}

TGI_INLINE void store(float* to, f32x16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int half = 0; half < 2; ++half) _mm256_storeu_ps(to + 8 * half, half_of(x, half));
#else
  std::memcpy(to, &x, 64);
#endif
}

TGI_INLINE u32x16 load_pairs(const void* from) {
  u32x16 x;
  std::memcpy(&x, from, 64);
  return x;
}

TGI_INLINE f32x16 load(const bf16* from) {
#if defined(__AVX512F__)
  // GCC compiles the conversion of a vector to four instructions.
  __m256i half;
  std::memcpy(&half, from, 32);
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  u16x16 half;
  std::memcpy(&half, from, 32);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Words whose upper halves are numbers rounded to bfloat16; what is below is not cleared.
TGI_INLINE __m256i rounded_words(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
#endif

TGI_INLINE void store(bf16* to, f32x16 x) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, 32);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_words(half_of(x, 0)), 16),
                                             _mm256_srli_epi32(rounded_words(half_of(x, 1)), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
#else
  u32x16 bits = (u32x16)x;
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  i32x16 is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  rounded = (u32x16)(((i32x16)rounded & ~is_nan) | (is_nan & 0x7fc0));
  u16x16 half = __builtin_convertvector(rounded, u16x16);
  std::memcpy(to, &half, 32);
#endif
}

// x as it would be had it been kept in bfloat16 in between.
TGI_INLINE f32x16 through_bf16(f32x16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
  for (int half = 0; half < 2; ++half)
    half_of(x, half) = _mm256_castsi256_ps(_mm256_and_si256(rounded_words(half_of(x, half)), upper));
  return x;
#else
  bf16 kept[16];
  store(kept, x);
  return load(kept);
#endif
}

// Two neighbouring bfloat16 numbers as one word, the first in the lower half.
TGI_INLINE uint32_t pair_at(const bf16* from) {
  uint32_t pair;
  std::memcpy(&pair, from, 4);
  return pair;
}

// a * b + c, rounded once: a sum of products comes out alike in every function, where the compiler
// would be free to choose what to fuse.
TGI_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  f32x16 sum;
  for (int half = 0; half < 2; ++half)
    half_of(sum, half) = _mm256_fmadd_ps(half_of(a, half), half_of(b, half), half_of(c, half));
  return sum;
#else
  return a * b + c;
#endif
}

// sum + a.first * b.first + a.second * b.second in each lane, in float32.
TGI_INLINE f32x16 dot2(f32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = fused((f32x16)(a << 16), (f32x16)(b << 16), sum);
  return fused((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), sum);
#endif
}

// The same for one pair beside all lanes' pairs.
TGI_INLINE f32x16 dot2(f32x16 sum, uint32_t a, u32x16 b) { return dot2(sum, u32x16{} + a, b); }

// Where one is a NaN, these are the second: a bound before a number lets a NaN through.
TGI_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

TGI_INLINE float maximum(float a, float b) { return a > b ? a : b; }

TGI_INLINE f32x16 minimum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// Combines the upper half of lanes with the lower, then the halves of those, and so on: always in the same order.
template <class Combine>
TGI_INLINE float in_halves(f32x16 x, const Combine& combine) {
#if defined(__AVX512F__)
  // In memory, each half would wait for the stores of the one before.
  x = combine(x, (f32x16)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xee));
  x = combine(x, (f32x16)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x55));
  x = combine(x, (f32x16)_mm512_permute_ps((__m512)x, 0xee));
  x = combine(x, (f32x16)_mm512_permute_ps((__m512)x, 0x55));
  return x[0];
#else
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = combine(lanes[i], lanes[i + width]);
  return lanes[0];
#endif
}

TGI_INLINE float sum_of(f32x16 x) {
  return in_halves(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

// The second of two lanes where the first is a NaN.
TGI_INLINE float maximum_of(f32x16 x) {
  return in_halves(x, [](auto a, auto b) __attribute__((always_inline)) { return maximum(a, b); });
}

// e^x to about 1 in 10^7; 0 below -87.3, and what is above 88.3 counts as that. -inf gives 0.
TGI_INLINE f32x16 exponential(f32x16 x) {
  i32x16 vanishes = x < -87.3f;
  x = minimum(splat(88.3f), maximum(splat(-87.3f), x));
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to an integer.
  f32x16 shifted = x * 1.44269504088896341f + 12582912.0f;
  f32x16 n = shifted - 12582912.0f;
  f32x16 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x16 exponent = (((i32x16)shifted - 0x4b400000) + 127) << 23;
  f32x16 result = p * (f32x16)exponent;
  return (f32x16)((i32x16)result & ~vanishes);
}

// 2^x to 3 in 10^6, and 1 for 0; vanishes far below, -inf included. For x to 126.
TGI_INLINE f32x16 power_of_two(f32x16 x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
#else
  i32x16 vanishes = x < -125.0f;
  x = maximum(splat(-125.0f), x);
  f32x16 shifted = (x - 0.5f) + 12582912.0f;  // floor(x), or one less: r is 1 then
  f32x16 r = x - (shifted - 12582912.0f);
#endif
  f32x16 p = splat(1.342668770e-2f);
  p = fused(p, r, splat(5.224246645e-2f));
  p = fused(p, r, splat(2.412802103e-1f));
  p = fused(p, r, splat(6.930448437e-1f));
  p = fused(p, r, splat(1.0f));
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  i32x16 power = ((i32x16)shifted - 0x4b400000) << 23;
  return (f32x16)(((i32x16)p + power) & ~vanishes);
#endif
}

TGI_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exponential(-x)); }

// tanh(x) = 1 - 2 / (1 + e^2x)
TGI_INLINE f32x16 hyperbolic_tangent(f32x16 x) {
  return 1.0f - 2.0f / (1.0f + exponential(2.0f * minimum(splat(9.0f), maximum(splat(-9.0f), x))));
}

}  // namespace tgi
