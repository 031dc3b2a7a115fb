// Numbers of 8 bits, e4m3fn and e5m2 of https://arxiv.org/abs/2209.05433: to and from bfloat16.
//
// In memory, 64 of them stand in an order that is made for widening them: a register of bytes is
// spread out to words within its sixteenths, lower halves to one register, upper ones to another.
#pragma once

#include <algorithm>

#include "simd.h"

namespace tgi {

typedef uint8_t u8x16 __attribute__((vector_size(16)));

struct Float8 {
  int mantissa;     // bits
  int bias;         // of the exponent
  float largest;
  uint32_t not_a_number;  // the least magnitude that is none, for what is kept here: no infinity is
};
constexpr Float8 E4M3 = {3, 7, 448.0f, 0x7f};
constexpr Float8 E5M2 = {2, 15, 57344.0f, 0x7c};

// Where the i-th of 64 stands: for what i is made up of, multiples of 32, of 8 and the rest, these
// places add up.
TGI_INLINE int64_t fp8_place(int64_t i) {
  const int64_t group = i & ~int64_t(63);
  const int64_t in = i & 31;
  return group + in / 8 * 16 + (i & 32) / 4 + in % 8;
}

// To the nearest, ties to even; what is too large to the largest; a NaN to a positive one.
TGI_INLINE u8x16 to_fp8(f32x16 x, Float8 format) {
  const u32x16 bits = (u32x16)x;
  const f32x16 magnitude = minimum(splat(format.largest), (f32x16)(bits & 0x7fffffffu));
  const u32x16 positive = (u32x16)magnitude;
  const int shift = 23 - format.mantissa;
  const u32x16 rounded = (positive + ((1u << (shift - 1)) - 1) + ((positive >> shift) & 1u)) >> shift;
  const u32x16 normal = rounded - (uint32_t(127 - format.bias) << format.mantissa);
  // Below the least normal number codes are multiples of the smallest; 1.5 * 2^23 rounds them.
  const float scale = float(1 << format.mantissa) * (format.bias == 7 ? 0x1p6f : 0x1p14f);
  const u32x16 small = (u32x16)(magnitude * scale + 12582912.0f) - 0x4b400000u;
  const f32x16 least = splat(format.bias == 7 ? 0x1p-6f : 0x1p-14f);
  const u32x16 code = (magnitude < least ? small : normal) | ((bits >> 24) & 0x80u);
  return __builtin_convertvector(x == x ? code : u32x16{} + 0x7fu, u8x16);
}

// A bfloat16 of a code, exactly.
inline bf16 fp8_to_bf16(uint32_t code, Float8 format) {
  const uint32_t magnitude = code & 0x7f, sign = (code & 0x80) << 8;
  if (magnitude >= format.not_a_number) return 0x7fc0;
  const uint32_t fraction = magnitude & ((1u << format.mantissa) - 1), exponent = magnitude >> format.mantissa;
  float value = float(exponent ? fraction + (1u << format.mantissa) : fraction);
  for (int power = std::max(int(exponent), 1) - format.bias - format.mantissa; power < 0; ++power) value /= 2;
  for (int power = int(exponent) - format.bias - format.mantissa; exponent && power > 0; --power) value *= 2;
  return bf16(to_bf16(value) | sign);
}

struct WideningTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];

  explicit WideningTable(Float8 format) {
    for (uint32_t code = 0; code < 128; ++code) {
      low[code] = uint8_t(fp8_to_bf16(code, format));
      high[code] = uint8_t(fp8_to_bf16(code, format) >> 8);
    }
  }
};

#if defined(__AVX512BW__)
// Bytes looked up in two registers of a table, which some processors with AVX-512 have not.
__attribute__((target("avx512vbmi"))) inline void widen_by_table(const uint8_t* from, int64_t count, Float8 format,
                                                                 bf16* to) {
  static const WideningTable tables[2] = {WideningTable(E4M3), WideningTable(E5M2)};
  const WideningTable& table = tables[format.bias != 7];
  const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
  const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  for (int64_t i = 0; i < count; i += 64) {
    const __m512i codes = _mm512_loadu_si512(from + i);
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    const __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i whole = _mm512_or_si512(high, _mm512_and_si512(codes, sign));
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, whole));
    _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low, whole));
  }
}
#endif

// `count` codes, a multiple of 64, as they stand in memory, to bfloat16 in their right order.
inline void widen(const uint8_t* from, int64_t count, Float8 format, bf16* to) {
#if defined(__AVX512BW__)
  static const bool by_table = __builtin_cpu_supports("avx512vbmi");
  if (by_table) return widen_by_table(from, count, format, to);
#endif
  // The bits of a narrow float are a wide one's but for the bias of the exponent, which a product
  // sets right, subnormal numbers included.
  const float correction = format.bias == 7 ? 0x1p120f : 0x1p112f;
  const int shift = 23 - format.mantissa;
  for (int64_t i = 0; i < count; i += 64) {
    for (int64_t lane = 0; lane < 4; ++lane) {
      u8x16 bytes;
      std::memcpy(&bytes, from + i + lane * 16, 16);
      const u32x16 codes = __builtin_convertvector(bytes, u32x16);
      const u32x16 magnitude = codes & 0x7fu;
      const u32x16 bits = (u32x16)((f32x16)(magnitude << shift) * correction) | ((codes & 0x80u) << 24);
      const u32x16 number = magnitude >= format.not_a_number ? u32x16{} + 0x7fc00000u : bits;
      const u16x16 words = __builtin_convertvector(number >> 16, u16x16);
      bf16 out[16];
      std::memcpy(out, &words, 32);
      std::memcpy(to + i + lane * 8, out, 16);
      std::memcpy(to + i + 32 + lane * 8, out + 8, 16);
    }
  }
}

}  // namespace tgi
