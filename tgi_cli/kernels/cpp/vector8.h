// Vectors of eight numbers, for inner loops on processors whose registers are that wide: there a
// vector of sixteen goes through memory.
#pragma once

#include "simd.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace tgi {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

TGI_INLINE f32x8 dot2(f32x8 sum, u32x8 a, u32x8 b) {
  sum += (f32x8)(a << 16) * (f32x8)(b << 16);
  return sum + (f32x8)(a & 0xffff0000u) * (f32x8)(b & 0xffff0000u);
}

TGI_INLINE f32x8 maximum(f32x8 a, f32x8 b) { return (f32x8)_mm256_max_ps((__m256)a, (__m256)b); }

TGI_INLINE f32x8 fused(f32x8 a, f32x8 b, f32x8 c) {
  return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

TGI_INLINE float sum_of(f32x8 x) {
  float lanes[8];
  std::memcpy(lanes, &x, 32);
  for (int width = 4; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

TGI_INLINE float maximum_of(f32x8 x) {
  float lanes[8];
  std::memcpy(lanes, &x, 32);
  for (int width = 4; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// As of sixteen.
TGI_INLINE f32x8 power_of_two(f32x8 x) {
  const i32x8 vanishes = x < -125.0f;
  x = maximum(f32x8{} - 125.0f, x);
  const f32x8 floor = (f32x8)_mm256_floor_ps((__m256)x);
  const f32x8 r = x - floor;
  f32x8 p = f32x8{} + 1.342668770e-2f;
  p = fused(p, r, f32x8{} + 5.224246645e-2f);
  p = fused(p, r, f32x8{} + 2.412802103e-1f);
  p = fused(p, r, f32x8{} + 6.930448437e-1f);
  p = fused(p, r, f32x8{} + 1.0f);
  const i32x8 power = (i32x8)_mm256_cvtps_epi32((__m256)floor) << 23;
  return (f32x8)(((i32x8)p + power) & ~vanishes);
}

// Of numbers that are not below 0, and may be a NaN.
TGI_INLINE void store_positive(bf16* to, f32x8 x) {
  const u32x8 bits = (u32x8)x;
  u32x8 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded |= (u32x8)(x != x) & 0x7fc0u;
  const __m256i packed = _mm256_packus_epi32((__m256i)(rounded & 0xffffu), (__m256i)u32x8{});
  const __m256i whole = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(whole));
}

}  // namespace tgi

#endif
