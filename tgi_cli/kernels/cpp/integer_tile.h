// The inner loops of a product in integers: a few quantized rows times panels of codes.
//
// Codes of an output are multiplied by four numbers of a row at a time, and the products added to a sum of
// 32 bits, exactly. The sum over a block of inputs is then scaled and added in float32.
#pragma once

#include "pieces.h"
#include "quantized_rows.h"

namespace tgi {

struct IntegerTile {
  QuantizedRows rows;  // from the tile's first row on
  int64_t numbers;     // offset of the first block's numbers in a row
  int64_t block;       // index of the first block
  int64_t blocks;      // in a row
  const uint8_t* panel;
  int64_t chunks;
  int64_t block_chunks;
  float* sums;  // [rows][32], added to; those of the next panel are sums_stride further on
  int64_t sums_stride;
  Ahead ahead;
  GroupScales scales;
  int64_t group_blocks;
};

// Panels of codes, read as bytes: those of four inputs for each output of vector v.
struct Int8Codes {
  static constexpr int INPUTS = 4;  // of a chunk
  static constexpr int STRIDE = 128;
  static constexpr int LARGEST = 255;

  static TGI_INLINE Words four(const uint8_t* chunk, int v, int) { return read<Words>(chunk + 4 * WIDTH * v); }
};

struct Int4Codes {
  static constexpr int INPUTS = 8;
  static constexpr int STRIDE = 256;
  static constexpr int LARGEST = 15;

  static TGI_INLINE Words four(const uint8_t* chunk, int v, int which) {
    const Words words = read<Words>(chunk + 4 * WIDTH * v);
    return (which ? words >> 4 : words) & 0x0f0f0f0fu;
  }
};

TGI_INLINE uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

TGI_INLINE float float_at(const uint8_t* from) {
  float number;
  std::memcpy(&number, from, 4);
  return number;
}

#if defined(__AVX512VNNI__)

// Adds to each lane the products of four unsigned codes and four signed numbers.
TGI_INLINE u32x16 add_fours(u32x16 sum, u32x16 codes, int32_t four) {
  return (u32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
}

// Of a panel, or of two that alternate.
template <class Codes, int PLANES, int ROWS, int PANELS>
void multiply_integers(const IntegerTile& tile) {
  constexpr int VECTORS = PANELS * PANEL_VECTORS;
  // How many planes have registers for their sums. If it is one, each plane reads the codes.
  constexpr int AT_ONCE = PLANES * ROWS * VECTORS <= SUMS - 8 ? PLANES : 1;
  // Where there are registers for the sums of a block and of all blocks. They are added up alike.
  constexpr bool KEEPS = (AT_ONCE + 1) * ROWS * VECTORS <= SUMS;
  // With fewer products between loads, the processor's own prefetcher does better.
  constexpr bool FETCHES = ROWS * PLANES * Codes::INPUTS >= 20;
  constexpr int LINES = (Codes::STRIDE == 256 ? 128 * PANELS : Codes::STRIDE) / 64;  // of a chunk
  // Every third row has a pointer: the two behind it are reached by the stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const int64_t stride = tile.rows.stride, plane = tile.block_chunks * Codes::INPUTS;
  const uint8_t* numbers[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) numbers[i] = tile.rows.first + tile.numbers + 3 * i * stride;
  const uint8_t* scale_of = tile.rows.first + 4 * tile.block;
  const int64_t field = 4 * tile.blocks;
  const uint8_t* panel = tile.panel;
  const bool grouped = tile.scales.kind != NO_GROUPS;
  Ahead ahead = tile.ahead;
  // With two passes over a block, a single tile divides what it fetches among them: memory would be idle
  // during the second.
  const bool divides = AT_ONCE < PLANES && ahead.step > 64;
  const int64_t step = divides ? ahead.step / 2 : ahead.step;
  int64_t in_group = 0, group = 0;
  auto kept = [&](int r, int v) {
    return tile.sums + v / PANEL_VECTORS * tile.sums_stride + r * PANEL + 16 * (v % PANEL_VECTORS);
  };

  f32x16 totals[KEEPS ? ROWS : 1][KEEPS ? VECTORS : 1];
  if constexpr (KEEPS) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) totals[r][v] = load(kept(r, v));
  }
  for (int64_t left = tile.chunks; left > 0; left -= tile.block_chunks) {
    const int64_t chunks = left < tile.block_chunks ? left : tile.block_chunks;
    // Unsigned, as sums may pass 2^31 on the way to a result that does not.
    u32x16 sums[ROWS][VECTORS], lower[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const u32x16 lacking = u32x16{} + word_at(scale_of + r * stride + field);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        sums[r][v] = PLANES == 1 ? lacking : u32x16{};
        lower[r][v] = lacking;
      }
    }

    auto add_plane = [&](int which) __attribute__((always_inline)) {
      const uint8_t* x[POINTERS];
#pragma GCC unroll 8
      for (int i = 0; i < POINTERS; ++i) x[i] = numbers[i] + which * plane;
      const uint8_t* chunk = panel;
      for (const uint8_t* end = chunk + chunks * Codes::STRIDE; chunk != end; chunk += Codes::STRIDE) {
        if (FETCHES && (which == 0 || divides)) {
          if (ahead.line == ahead.end) ahead.line = ahead.then;
          __builtin_prefetch(ahead.line, 0, 2);
#pragma GCC unroll 8
          for (int line = 1; line < LINES; ++line)
            if (step > 64 * line) __builtin_prefetch(ahead.line + 64 * line, 0, 2);
          ahead.line += step;
        }
#pragma GCC unroll 4
        for (int part = 0; part < Codes::INPUTS / 4; ++part) {
          u32x16 codes[VECTORS];
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v)
            codes[v] = Codes::four(chunk + v / PANEL_VECTORS * 128, v % PANEL_VECTORS, part);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            const uint8_t* from = x[r / 3] + (r % 3) * stride + 4 * part;
            const int32_t four = int32_t(word_at(from));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_fours(sums[r][v], codes[v], four);
            if constexpr (AT_ONCE == 2) {
              const int32_t lower_four = int32_t(word_at(from + plane));
#pragma GCC unroll 4
              for (int v = 0; v < VECTORS; ++v) lower[r][v] = add_fours(lower[r][v], codes[v], lower_four);
            }
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < POINTERS; ++i) x[i] += Codes::INPUTS;
      }
      // Without this, GCC copies sums for what comes behind the loop within it, to memory.
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          __asm__("" : "+v"(sums[r][v]));
          if constexpr (AT_ONCE == 2) __asm__("" : "+v"(lower[r][v]));
        }
    };
    add_plane(0);
    if constexpr (PLANES == 2) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const u32x16 lacking = u32x16{} + word_at(scale_of + r * stride + field);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = (sums[r][v] << 8) + (AT_ONCE == 2 ? lower[r][v] : lacking);
      }
      if constexpr (AT_ONCE == 1) add_plane(1);
    }

    f32x16 scale[VECTORS], offset[VECTORS];
    if (grouped) tile.scales.of_group<VECTORS, 0>(group, scale, offset);
    auto add_block = [&](auto in_groups, auto offsets) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const f32x16 row_scale = splat(float_at(scale_of + r * stride));
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          f32x16 total;
          if constexpr (KEEPS) total = totals[r][v];
          else total = load(kept(r, v));
          const f32x16 sum = __builtin_convertvector((i32x16)sums[r][v], f32x16);
          f32x16 factor = row_scale;
          if constexpr (in_groups) factor = scale[v] * row_scale;
          total = fused(factor, sum, total);
          if constexpr (offsets) total = fused(offset[v], splat(float_at(scale_of + r * stride + 2 * field)), total);
          if constexpr (KEEPS) totals[r][v] = total;
          else store(kept(r, v), total);
        }
      }
    };
    if (tile.scales.offsets)
      add_block(std::true_type{}, std::true_type{});
    else if (grouped)
      add_block(std::true_type{}, std::false_type{});
    else
      add_block(std::false_type{}, std::false_type{});

    panel += chunks * Codes::STRIDE;
#pragma GCC unroll 8
    for (int i = 0; i < POINTERS; ++i) numbers[i] += PLANES * plane;
    scale_of += 4;
    if (grouped && ++in_group == tile.group_blocks) {
      in_group = 0;
      ++group;
    }
  }
  if constexpr (KEEPS) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(kept(r, v), totals[r][v]);
  }
}

// Of so few rows, two panels that alternate are multiplied at once.
constexpr int64_t TWO_INTEGER_PANELS_ROWS = 3;

// The same with the number of rows known at run time.
template <class Codes, int PLANES, int PANELS = 1, int ROWS = TILE_ROWS>
void multiply_integer_rows(const IntegerTile& tile, int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_integer_rows<Codes, PLANES, PANELS, ROWS - 1>(tile, rows);
  multiply_integers<Codes, PLANES, ROWS, PANELS>(tile);
}

#endif

}  // namespace tgi
