// The vectors of products: as wide as registers are.
#pragma once

#include "matrix.h"

namespace tgi {

// Vectors as wide as registers are: with wider ones the compiler goes through memory. As many rows
// are taken at once as there are registers for their sums.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
typedef f32x16 Floats;
typedef u32x16 Words;
typedef u16x16 Halves;
constexpr int TILE_ROWS = 12;
constexpr int WHOLE_PANEL_ROWS = 2;  // of so many there are enough for all vectors of a panel
constexpr int TWO_PANELS_ROWS = 5;  // and of so many there are enough for two panels
using Input = bf16;                 // what products read x in

TGI_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return fused(a, b, c); }
TGI_INLINE Floats add_pairs(Floats sum, Words a, Words b) { return dot2(sum, a, b); }
#else
constexpr int WIDTH = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
constexpr int TILE_ROWS = 6;
constexpr int WHOLE_PANEL_ROWS = 3;
constexpr int TWO_PANELS_ROWS = 0;
// There are no products of bfloat16 numbers: x is converted once for all panels, and then read into all lanes by a
// load, while the conversion of weights, once for all rows, is hidden by the products.
using Input = float;

TGI_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// sum += a * b. Left to itself, the compiler puts a sum into the register of a factor, copies it back for the next
// iteration, and where sums take almost all registers, does so through memory: at half the speed.
TGI_INLINE void accumulate(Floats& sum, Floats a, Floats b) {
#if defined(__FMA__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = multiply_add(a, b, sum);
#endif
}

// A number in all lanes: the compiler would add it to zeros first, whose sign matters.
TGI_INLINE Floats everywhere(const void* number) {
#if defined(__AVX2__)
  return (Floats)_mm256_broadcast_ss(static_cast<const float*>(number));
#else
  return Floats{} + *static_cast<const float*>(number);
#endif
}

// The first numbers of pairs, or the second.
TGI_INLINE Floats numbers_of(Words pairs, int which) {
  return (Floats)(which ? pairs & 0xffff0000u : pairs << 16);
}
#endif
constexpr bool WIDE_INPUTS = sizeof(Input) == 4;
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
constexpr int TILE_VECTORS = 2;
constexpr int PANEL_VECTORS = PANEL / WIDTH;
constexpr int SUMS = TILE_ROWS * TILE_VECTORS;  // registers for sums

template <class Vector>
TGI_INLINE Vector read(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Bytes as float32 numbers.
template <bool SIGNED>
TGI_INLINE Floats floats_of(const void* from) {
#if defined(__AVX512F__)
  const __m128i bytes = read<__m128i>(from);
  return (Floats)_mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return (Floats)_mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  Floats numbers;
  for (int i = 0; i < WIDTH; ++i)
    numbers[i] = SIGNED ? float(static_cast<const int8_t*>(from)[i]) : float(static_cast<const uint8_t*>(from)[i]);
  return numbers;
#endif
}

// Float16 numbers as float32.
TGI_INLINE Floats floats_of_halves(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#else
  Floats numbers;
  for (int i = 0; i < WIDTH; ++i) numbers[i] = half_to_float(static_cast<const uint16_t*>(from)[i]);
  return numbers;
#endif
}

}  // namespace tgi
