// The inner loops of a product: a few rows times a panel of 32 outputs.
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
constexpr int TWO_PANELS_ROWS = 5;  // and of so many there are enough for two panels

TGI_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return fused(a, b, c); }
TGI_INLINE Floats add_pairs(Floats sum, Words a, Words b) { return dot2(sum, a, b); }
#else
constexpr int WIDTH = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
constexpr int TILE_ROWS = 4;
constexpr int TWO_PANELS_ROWS = 0;

TGI_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

TGI_INLINE Floats add_pairs(Floats sum, Words a, Words b) {
  sum = multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
  return multiply_add((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), sum);
}
#endif
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
constexpr int TILE_VECTORS = 2;
constexpr int PANEL_VECTORS = PANEL / WIDTH;

template <class Vector>
TGI_INLINE Vector read(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Small integers as pairs of bfloat16 numbers.
TGI_INLINE Words pairs_of(Integers even, Integers odd) {
  Words first = (Words)__builtin_convertvector(even, Floats);
  Words second = (Words)__builtin_convertvector(odd, Floats);
  return first >> 16 | second;
}

// Panels in their formats, a chunk at a time: the bfloat16 numbers of a pair of inputs for the
// outputs of vector v of the panel.
struct Bf16Panel {
  static constexpr int PAIRS = 1;  // in a chunk
  static constexpr int BYTES = 128;
  static constexpr int STRIDE = 128;  // to the next chunk

  static TGI_INLINE Words decode(const uint8_t* chunk, int v, int) {
    return read<Words>(chunk + 4 * WIDTH * v);
  }
};

struct Int8Panel {
  static constexpr int PAIRS = 1;
  static constexpr int BYTES = 64;
  static constexpr int STRIDE = 64;

  static TGI_INLINE Words decode(const uint8_t* chunk, int v, int) {
    const uint8_t* codes = chunk + 2 * WIDTH * v;
#if defined(__AVX512BF16__)
    __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    __m512i second =
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16)));
    return (Words)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(second), _mm512_cvtepi32_ps(first));
#else
    Integers both = __builtin_convertvector(read<Halves>(codes), Integers);
    return pairs_of(both << 24 >> 24, both << 16 >> 24);
#endif
  }
};

struct Int4Panel {
  static constexpr int PAIRS = 4;
  static constexpr int BYTES = 128;
  static constexpr int STRIDE = 256;

  static TGI_INLINE Words decode(const uint8_t* chunk, int v, int pair) {
    const Words codes = read<Words>(chunk + 4 * WIDTH * v) >> (4 * pair);
#if defined(__AVX512BW__)
    // The numbers -8 to 7 in bfloat16, twice: a look-up takes five bits, the fifth is the next
    // code's first.
    const __m512i numbers = _mm512_set_epi16(
        0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, int16_t(0xbf80), int16_t(0xc000),
        int16_t(0xc040), int16_t(0xc080), int16_t(0xc0a0), int16_t(0xc0c0), int16_t(0xc0e0),
        int16_t(0xc100), 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, int16_t(0xbf80),
        int16_t(0xc000), int16_t(0xc040), int16_t(0xc080), int16_t(0xc0a0), int16_t(0xc0c0),
        int16_t(0xc0e0), int16_t(0xc100));
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, numbers);
#else
    return pairs_of((Integers)(codes & 15u) - 8, (Integers)(codes >> 16 & 15u) - 8);
#endif
  }
};

// A tile to compute: rows of x times some chunks of a panel, or of two that alternate.
struct Tile {
  const bf16* x;
  int64_t x_stride;
  const uint8_t* panel;
  int64_t groups;        // of inputs that share a scale
  int64_t group_chunks;
  int64_t chunks;  // of all groups; the last one may be shorter
  bool first;      // the sums are to be started
  float* sums;     // [rows][32], those of the next panel sums_stride behind
  int64_t sums_stride;
  // What comes after this panel is called into the cache meanwhile, so many bytes per chunk:
  // into the first level if there is time for it, else, as more can be under way, the second.
  const uint8_t* ahead;
  int64_t ahead_step;
  bool ahead_near;
  // Where inputs share a scale: sums += scale * (product - zero * sum of x)
  const float* scales;  // [groups][32], those of the next panel scales_stride behind; or null
  const float* zeros;   // like scales, or null
  int64_t scales_stride;
  const float* x_sums;  // [rows][groups]
};

// So many of a panel's vectors, from `FIRST` on; or all of two panels'.
template <class Panel, int ROWS, int VECTORS, int FIRST = 0>
void multiply(const Tile& tile) {
  float* const to = tile.sums + WIDTH * FIRST;
  const int64_t sums_stride = tile.sums_stride;
  auto kept = [&](int r, int v) {
    return to + v / PANEL_VECTORS * sums_stride + r * PANEL + WIDTH * (v % PANEL_VECTORS);
  };
  const int64_t stride = tile.x_stride;
  const uint8_t *panel = tile.panel, *ahead = tile.ahead;
  const int64_t ahead_step = tile.ahead_step;
  const bool ahead_near = tile.ahead_near;
  // Every third row has a pointer: the two behind it are reached by its stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const bf16* rows[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) rows[i] = tile.x + 3 * i * stride;

  bool first = tile.first;
  const bool scaled = tile.scales;
  int64_t chunks = tile.chunks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = first || scaled ? Floats{} : read<Floats>(kept(r, v));

    const int64_t now = chunks < tile.group_chunks ? chunks : tile.group_chunks;
    chunks -= now;
    for (const uint8_t* end = panel + now * Panel::STRIDE; panel != end; panel += Panel::STRIDE) {
      if constexpr (ROWS >= TILE_ROWS / 2 || Panel::STRIDE > Panel::BYTES) {
        if (ahead_near) {
          __builtin_prefetch(ahead, 0, 3);
          if (Panel::STRIDE > Panel::BYTES) __builtin_prefetch(ahead + 64, 0, 3);
        } else {
          __builtin_prefetch(ahead, 0, 2);
        }
        ahead += ahead_step;
      }
#pragma GCC unroll 4
      for (int pair = 0; pair < Panel::PAIRS; ++pair) {
        Words weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
          weights[v] = Panel::decode(panel + v / PANEL_VECTORS * Panel::BYTES,
                                     v % PANEL_VECTORS + FIRST, pair);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          Words x = Words{} + pair_at(rows[r / 3] + (r % 3) * stride + 2 * pair);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_pairs(sums[r][v], x, weights[v]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < POINTERS; ++i) rows[i] += 2 * Panel::PAIRS;
    }

    if (!scaled) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) std::memcpy(kept(r, v), &sums[r][v], sizeof(Floats));
      return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = group * PANEL + v / PANEL_VECTORS * tile.scales_stride +
                         WIDTH * (v % PANEL_VECTORS + FIRST);
      const Floats scale = read<Floats>(tile.scales + at);
      if (tile.zeros) {
        const Floats zero = read<Floats>(tile.zeros + at);
        const float* x_sums = tile.x_sums + group;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
          sums[r][v] = multiply_add(zero, Floats{} - x_sums[r * tile.groups], sums[r][v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        Floats before = first ? Floats{} : read<Floats>(kept(r, v));
        Floats sum = multiply_add(scale, sums[r][v], before);
        std::memcpy(kept(r, v), &sum, sizeof sum);
      }
    }
    first = false;
  }
}

}  // namespace tgi
