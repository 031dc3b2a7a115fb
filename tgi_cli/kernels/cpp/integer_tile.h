// The inner loops of a product in integers: a few quantized rows times panels of codes.
//
// One instruction multiplies four codes of an output by four numbers of a row and adds the products
// to a sum of 32 bits, exactly. The sum over a block of inputs is then scaled and added in float32.
#pragma once

#include "quantized_rows.h"
#include "tile.h"

#if defined(__AVX512VNNI__)

namespace tgi {

struct IntegerTile {
  QuantizedRows rows;  // from the tile's first row on
  int64_t numbers;     // offset of the first block's numbers in a row
  int64_t block;       // index of the first block
  int64_t blocks;      // in a row
  const uint8_t* panel;
  int64_t panels;  // 1, or 2 that alternate
  int64_t chunks;
  int64_t block_chunks;
  float* sums;  // [rows][32], added to; those of the next panel are sums_stride further on
  int64_t sums_stride;
  Ahead ahead;
  // Where inputs share a scale, as in Tile.
  const float* scales;
  const float* zeros;
  int64_t scales_stride;
  int64_t group_blocks;
  Levels levels;
};

// Panels of codes, read as bytes: those of four inputs for each of 16 outputs.
struct Int8Codes {
  static constexpr int INPUTS = 4;  // of a chunk
  static constexpr int STRIDE = 128;
  static constexpr int MIDDLE = 128;  // the code of 0

  static TGI_INLINE u32x16 four(const uint8_t* chunk, int v, int) { return load_pairs(chunk + 64 * v); }
};

struct Int4Codes {
  static constexpr int INPUTS = 8;
  static constexpr int STRIDE = 256;
  static constexpr int MIDDLE = 8;

  static TGI_INLINE u32x16 four(const uint8_t* chunk, int v, int which) {
    const u32x16 words = load_pairs(chunk + 64 * v);
    return (which ? words >> 4 : words) & 0x0f0f0f0fu;
  }
};

// Adds to each lane the products of four unsigned codes and four signed numbers.
TGI_INLINE u32x16 add_fours(u32x16 sum, u32x16 codes, int32_t four) {
  return (u32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
}

// What scales the sum of a block: the row's scale, a group's scale as well, its zero as well; scales
// in two levels, with minima.
enum Scaling { OF_ROWS, OF_GROUPS, WITH_ZEROS, TWO_LEVELS, WITH_MINIMA };

template <class Codes, int PLANES, int ROWS>
void multiply_integers(const IntegerTile& tile) {
  constexpr int VECTORS = 2;
  // How many planes have registers for their sums. If it is one, each plane reads the codes.
  constexpr int AT_ONCE = PLANES * ROWS * VECTORS <= 24 ? PLANES : 1;
  // With fewer products between loads, the processor's own prefetcher does better.
  constexpr bool FETCHES = ROWS * PLANES * Codes::INPUTS >= 20;
  constexpr int LINES = Codes::STRIDE == 256 ? 2 : Codes::STRIDE / 64;  // of a chunk; of two, panels alternate
  // Every third row has a pointer: the two behind it are reached by the stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const int64_t stride = tile.rows.stride, plane = tile.block_chunks * Codes::INPUTS;
  const uint8_t* numbers[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) numbers[i] = tile.rows.first + tile.numbers + 3 * i * stride;
  const uint8_t* scale_of = tile.rows.first + 4 * tile.block;
  const int64_t offsets = 4 * tile.blocks;
  const uint8_t* panel = tile.panel;
  const float *scales = tile.scales, *zeros = tile.zeros;
  Ahead ahead = tile.ahead;
  // With two passes over a block, a single tile divides what it fetches among them: memory would be idle
  // during the second.
  const bool divides = AT_ONCE < PLANES && ahead.step > 64;
  const int64_t step = divides ? ahead.step / 2 : ahead.step;
  int64_t in_group = 0, group = 0;

  for (int64_t left = tile.chunks; left > 0; left -= tile.block_chunks) {
    const int64_t chunks = left < tile.block_chunks ? left : tile.block_chunks;
    for (int64_t p = 0; p < tile.panels; ++p) {
      // Unsigned, as sums may pass 2^31 on the way to a result that does not.
      u32x16 sums[ROWS][VECTORS], lower[ROWS][VECTORS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = lower[r][v] = u32x16{};

      auto add_plane = [&](int which) __attribute__((always_inline)) {
        const uint8_t* x[POINTERS];
#pragma GCC unroll 8
        for (int i = 0; i < POINTERS; ++i) x[i] = numbers[i] + which * plane;
        const uint8_t* chunk = panel + p * 128;
        for (const uint8_t* end = chunk + chunks * Codes::STRIDE; chunk != end; chunk += Codes::STRIDE) {
          if (FETCHES && (which == 0 || divides)) {
            if (ahead.line == ahead.end) ahead.line = ahead.then;
            __builtin_prefetch(ahead.line, 0, 2);
#pragma GCC unroll 4
            for (int line = 1; line < LINES; ++line)
              if (step > 64 * line) __builtin_prefetch(ahead.line + 64 * line, 0, 2);
            ahead.line += step;
          }
#pragma GCC unroll 4
          for (int part = 0; part < Codes::INPUTS / 4; ++part) {
            u32x16 codes[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) codes[v] = Codes::four(chunk, v, part);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
              const uint8_t* from = x[r / 3] + (r % 3) * stride + 4 * part;
              int32_t four;
              std::memcpy(&four, from, 4);
#pragma GCC unroll 2
              for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_fours(sums[r][v], codes[v], four);
              if constexpr (AT_ONCE == 2) {
                std::memcpy(&four, from + plane, 4);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) lower[r][v] = add_fours(lower[r][v], codes[v], four);
              }
            }
          }
#pragma GCC unroll 8
          for (int i = 0; i < POINTERS; ++i) x[i] += Codes::INPUTS;
        }
      };
      add_plane(0);
      if constexpr (PLANES == 2) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < VECTORS; ++v) sums[r][v] = (sums[r][v] << 8) + lower[r][v];
        if constexpr (AT_ONCE == 1) add_plane(1);
      }

      auto add_block = [&](Scaling how) __attribute__((always_inline)) {
        float* to = tile.sums + p * tile.sums_stride;
        const int64_t of_panel = p * tile.scales_stride;
        f32x16 scale[VECTORS], zero[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
          if (how == OF_GROUPS || how == WITH_ZEROS) scale[v] = load(scales + of_panel + 16 * v);
          if (how == WITH_ZEROS) zero[v] = load(zeros + of_panel + 16 * v);
          if (how == TWO_LEVELS || how == WITH_MINIMA) scale[v] = tile.levels.scale(group, p, v);
          if (how == WITH_MINIMA) zero[v] = tile.levels.offset(group, p, v, scale[v]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r, to += PANEL) {
          const uint8_t* of_row = scale_of + r * stride;
          float row_scale;
          int32_t offset;
          std::memcpy(&row_scale, of_row, 4);
          std::memcpy(&offset, of_row + offsets, 4);
#pragma GCC unroll 2
          for (int v = 0; v < VECTORS; ++v) {
            f32x16 sum = __builtin_convertvector((i32x16)(sums[r][v] + uint32_t(offset)), f32x16);
            if (how == WITH_ZEROS) sum = fused(zero[v], splat(float(offset) * (1.0f / Codes::MIDDLE)), sum);
            if (how == WITH_MINIMA)
              sum = fused(zero[v], splat(float(offset) * (1.0f / Codes::MIDDLE)), scale[v] * sum);
            const f32x16 factor =
                how == OF_ROWS || how == WITH_MINIMA ? splat(row_scale) : scale[v] * row_scale;
            store(to + 16 * v, fused(factor, sum, load(to + 16 * v)));
          }
        }
      };
      if (tile.levels.minima)
        add_block(WITH_MINIMA);
      else if (tile.levels.codes)
        add_block(TWO_LEVELS);
      else if (zeros)
        add_block(WITH_ZEROS);
      else if (scales)
        add_block(OF_GROUPS);
      else
        add_block(OF_ROWS);
    }
    panel += chunks * Codes::STRIDE;
#pragma GCC unroll 8
    for (int i = 0; i < POINTERS; ++i) numbers[i] += PLANES * plane;
    scale_of += 4;
    if (tile.group_blocks && ++in_group == tile.group_blocks) {
      in_group = 0;
      ++group;
      if (scales) scales += PANEL;
      if (zeros) zeros += PANEL;
    }
  }
}

// The same with the number of rows known at run time.
template <class Codes, int PLANES, int ROWS = TILE_ROWS>
void multiply_integer_rows(const IntegerTile& tile, int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_integer_rows<Codes, PLANES, ROWS - 1>(tile, rows);
  multiply_integers<Codes, PLANES, ROWS>(tile);
}

}  // namespace tgi

#endif
