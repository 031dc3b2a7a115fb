// The inner loops of a product: a few rows times a panel of 32 outputs.
#pragma once

#include "matrix.h"

namespace tgi {

// As many rows at once as there are registers for their sums.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;
constexpr int TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 4;
constexpr int TILE_VECTORS = 1;
#endif

// Panels in their formats, a chunk at a time: for the 16 outputs of vector v (0 or 1) the
// bfloat16 numbers of pairs of inputs.
struct Bf16Panel {
  static constexpr int PAIRS = 1;  // in a chunk
  static constexpr int BYTES = 128;

  static TGI_INLINE void decode(const uint8_t* chunk, int v, u32x16* pairs) {
    pairs[0] = load_pairs(chunk + 64 * v);
  }
};

struct Int8Panel {
  static constexpr int PAIRS = 1;
  static constexpr int BYTES = 64;

  static TGI_INLINE void decode(const uint8_t* chunk, int v, u32x16* pairs) {
    const uint8_t* codes = chunk + 32 * v;
#if defined(__AVX512BF16__)
    __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    __m512i second =
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16)));
    pairs[0] = (u32x16)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(second), _mm512_cvtepi32_ps(first));
#else
    u16x16 both;
    std::memcpy(&both, codes, 32);
    i32x16 words = __builtin_convertvector(both, i32x16);
    f32x16 even = __builtin_convertvector((words << 24) >> 24, f32x16);
    f32x16 odd = __builtin_convertvector((words << 16) >> 24, f32x16);
    pairs[0] = ((u32x16)even >> 16) | (u32x16)odd;
#endif
  }
};

struct Int4Panel {
  static constexpr int PAIRS = 4;
  static constexpr int BYTES = 128;

  static TGI_INLINE void decode(const uint8_t* chunk, int v, u32x16* pairs) {
    u32x16 codes = load_pairs(chunk + 64 * v);
#if defined(__AVX512BW__)
    // The numbers -8 to 7 in bfloat16, twice: a look-up takes five bits, the fifth is the next
    // code's first.
    const __m512i numbers = _mm512_set_epi16(
        0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, int16_t(0xbf80), int16_t(0xc000),
        int16_t(0xc040), int16_t(0xc080), int16_t(0xc0a0), int16_t(0xc0c0), int16_t(0xc0e0),
        int16_t(0xc100), 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, int16_t(0xbf80),
        int16_t(0xc000), int16_t(0xc040), int16_t(0xc080), int16_t(0xc0a0), int16_t(0xc0c0),
        int16_t(0xc0e0), int16_t(0xc100));
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; ++i)
      pairs[i] = (u32x16)_mm512_permutexvar_epi16((__m512i)(codes >> (4 * i)), numbers);
#else
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; ++i) {
      f32x16 even = __builtin_convertvector((i32x16)((codes >> (4 * i)) & 15u) - 8, f32x16);
      f32x16 odd = __builtin_convertvector((i32x16)((codes >> (16 + 4 * i)) & 15u) - 8, f32x16);
      pairs[i] = ((u32x16)even >> 16) | (u32x16)odd;
    }
#endif
  }
};

// A tile to compute: rows of x times some chunks of a panel, or of neighbouring ones.
struct Tile {
  const bf16* x;
  int64_t x_stride;
  const uint8_t* panel;
  int64_t panel_stride;  // bytes to the next
  int64_t chunks;
  bool first;   // the sums are to be started
  float* sums;  // [panels][sums_stride], a row's are 32
  int64_t sums_stride;
  // Where the inputs share a scale: sums += scale * (product - zero * sum of x)
  const float* scales;  // [32], those of the next panel scales_stride behind; or null
  const float* zeros;   // or null
  int64_t scales_stride;
  const float* x_sums;  // a row's, x_sums_stride behind one another
  int64_t x_sums_stride;
};

template <class Panel, int ROWS, int VECTORS, int FIRST = 0>
void multiply(const Tile& tile) {
  f32x16 sums[ROWS][VECTORS];
  float* const to = tile.sums;
  const int64_t sums_stride = tile.sums_stride;
  auto kept = [&](int r, int v) {
    return to + (v / 2) * sums_stride + r * PANEL + 16 * ((v + FIRST) % 2);
  };
  const bool first = tile.first, scaled = tile.scales;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v)
      sums[r][v] = first || scaled ? splat(0.0f) : load(kept(r, v));

  // Every third row has a pointer: the two behind it are reached by its stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const int64_t stride = tile.x_stride;
  const bf16* rows[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) rows[i] = tile.x + 3 * i * stride;
  const uint8_t* panel = tile.panel;
  const int64_t panel_stride = tile.panel_stride;
  for (const uint8_t* end = panel + tile.chunks * Panel::BYTES; panel != end;
       panel += Panel::BYTES) {
    u32x16 weights[VECTORS][Panel::PAIRS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v)
      Panel::decode(panel + (v / 2) * panel_stride, (v + FIRST) % 2, weights[v]);
#pragma GCC unroll 4
    for (int pair = 0; pair < Panel::PAIRS; ++pair)
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        u32x16 x = u32x16{} + pair_at(rows[r / 3] + (r % 3) * stride + 2 * pair);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot2(sums[r][v], x, weights[v][pair]);
      }
#pragma GCC unroll 8
    for (int i = 0; i < POINTERS; ++i) rows[i] += 2 * Panel::PAIRS;
  }

  const float *zeros = tile.zeros, *x_sums = tile.x_sums;
  const int64_t x_sums_stride = tile.x_sums_stride;
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
    if (scaled) {
      int64_t at = (v / 2) * tile.scales_stride + 16 * ((v + FIRST) % 2);
      f32x16 scale = load(tile.scales + at);
      f32x16 zero = zeros ? load(zeros + at) : splat(0.0f);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        f32x16 product = sums[r][v];
        if (zeros) product = fused(zero, splat(-x_sums[r * x_sums_stride]), product);
        store(kept(r, v), fused(scale, product, first ? splat(0.0f) : load(kept(r, v))));
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) store(kept(r, v), sums[r][v]);
    }
  }
}

}  // namespace tgi
