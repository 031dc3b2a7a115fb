// Products of rows of integers with AVX2 where there are more than a few: a run of blocks of a panel at a time, whose
// codes are decoded and scales converted once for all rows.
//
// Sums are those of integer_pairs.h, to the last bit: those of a block are exact, and blocks are scaled and added in
// the same order.
//
// On a Zen 3 at 3.06 GHz, 32 rows by 4-bit codes run at 215 Gop/s within multiply_half(), of which two products and
// two other instructions per cycle would allow 320, and at 160 in all. By 8-bit codes they run at 100: all ways to
// multiply bytes of full range (with signs, in two halves of four bits, as 16 bits) take four instructions for 32
// products, and came out within 10 % of 120.
#pragma once

#include "integer_pairs.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace tgi {

// Inputs of a run: codes and the rows' numbers, 48 of them at most, are in the first-level cache.
constexpr int64_t RUN_INPUTS = 256;
constexpr int FOUR_BYTES = 4 * PANEL;  // of four inputs for each output, as int8 panels have them

// A run of a panel.
struct Run {
  int64_t fours, blocks;
  const uint8_t* codes;  // [fours of inputs][32 outputs][4 inputs]: `decoded`, or the panel itself
  bool offsets;
  alignas(64) uint8_t decoded[RUN_INPUTS / 4 * FOUR_BYTES];
  Floats scale[RUN_INPUTS / 16][PANEL_VECTORS];  // of blocks
  Floats offset[RUN_INPUTS / 16][PANEL_VECTORS];

  // So many chunks of the tile's panel, from the first on.
  template <class Codes>
  void decode(const IntegerTile& tile, int64_t first, int64_t chunks) {
    constexpr int FOURS = Codes::INPUTS / 4;
    const int64_t first_block = first / tile.block_chunks;
    blocks = (chunks + tile.block_chunks - 1) / tile.block_chunks;
    fours = blocks * tile.block_chunks * FOURS;
    const uint8_t* chunk = tile.panel + first * Codes::STRIDE;
    codes = decoded;
    if (Codes::LARGEST > 127 && chunks * FOURS == fours) {
      codes = chunk;
    } else {
      uint8_t* to = decoded;
      for (int64_t i = 0; i < chunks; ++i, chunk += Codes::STRIDE)
#pragma GCC unroll 4
        for (int four = 0; four < FOURS; ++four, to += FOUR_BYTES)
#pragma GCC unroll 4
          for (int v = 0; v < PANEL_VECTORS; ++v) {
            const Words words = Codes::four(chunk, v, four);
            std::memcpy(to + 4 * WIDTH * v, &words, sizeof words);
          }
      // Behind the last input numbers are 0, but whatever they are multiplied by must be there.
      std::memset(to, 0, size_t(decoded + fours * FOUR_BYTES - to));
    }
    offsets = tile.scales.offsets;
    for (int64_t b = 0; b < blocks; ++b) {
      if (tile.scales.kind == NO_GROUPS)
        std::fill_n(scale[b], PANEL_VECTORS, Floats{} + 1.0f);  // a row's scale times 1 is itself
      else
        tile.scales.of_group<PANEL_VECTORS, 0>((first_block + b) / tile.group_blocks, scale[b], offset[b]);
    }
  }
};

// Rows to multiply by a run.
struct RunRows {
  const uint8_t* numbers;  // of the first row and block
  const uint8_t* scales;   // likewise
  int64_t stride;          // to the next row
  int64_t field;           // from scales to what sums lack, and from there to the negated sums
  float* sums;             // [rows][32], added to
  // What to fetch into the second-level cache meanwhile, with each block and half of a panel so many bytes.
  const uint8_t* ahead;
  int64_t ahead_bytes;
};

// Half a panel. A register has sums of `SPAN` fours in 16 bits: as many as they hold. With AVX-VNNI, it has sums of
// 32 bits at once.
template <class Codes, int BLOCK_FOURS, int ROWS>
void multiply_half(const Run& run, const RunRows& rows, int64_t first) {
  constexpr int HALF = PANEL_VECTORS / 2;
  constexpr int MOST = Codes::LARGEST > 127 ? 1 : Codes::LARGEST > 31 ? 2 : Codes::LARGEST > 15 ? 4 : 8;
  constexpr int SPAN = MOST < BLOCK_FOURS ? MOST : BLOCK_FOURS;
  static_assert(Codes::LARGEST > 127 || SPAN * 2 * 127 * Codes::LARGEST < 1 << 15);
  const uint8_t *codes = run.codes + 4 * first, *x = rows.numbers, *scales = rows.scales, *ahead = rows.ahead;
  const uint8_t *lacking = scales + rows.field, *negated = lacking + rows.field;
  const int64_t stride = rows.stride, ahead_bytes = rows.ahead_bytes;
  float* const totals = rows.sums + first;
  const Floats *scale = run.scale[0] + first / WIDTH, *offset = run.offset[0] + first / WIDTH;
  const bool offsets = run.offsets;
  const __m256i ones = _mm256_set1_epi16(1);

  for (int64_t block = run.blocks; block > 0; --block) {
    for (int64_t line = 0; line < ahead_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    ahead += ahead_bytes;
    __m256i sums[ROWS][HALF];
    if constexpr (ADDS_FOURS) {
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < HALF; ++v) sums[r][v] = _mm256_setzero_si256();
#pragma GCC unroll 2
      for (int i = 0; i < BLOCK_FOURS; ++i, codes += FOUR_BYTES, x += 4) {
        __m256i four[HALF];
#pragma GCC unroll 2
        for (int v = 0; v < HALF; ++v) four[v] = read<__m256i>(codes + 4 * WIDTH * v);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const __m256i numbers = _mm256_set1_epi32(int32_t(word_at(x + r * stride)));
#pragma GCC unroll 2
          for (int v = 0; v < HALF; ++v) sums[r][v] = add_fours(four[v], numbers, sums[r][v]);
        }
      }
    } else if constexpr (UNSIGNED<Codes>) {
#pragma GCC unroll 8
      for (int span = 0; span < BLOCK_FOURS / SPAN; ++span) {
        __m256i pairs[ROWS][HALF];
#pragma GCC unroll 8
        for (int i = 0; i < SPAN; ++i) {
          __m256i four[HALF];
#pragma GCC unroll 2
          for (int v = 0; v < HALF; ++v) four[v] = read<__m256i>(codes + i * FOUR_BYTES + 4 * WIDTH * v);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const __m256i numbers = _mm256_set1_epi32(int32_t(word_at(x + r * stride + 4 * i)));
#pragma GCC unroll 2
            for (int v = 0; v < HALF; ++v) {
              const __m256i products = _mm256_maddubs_epi16(four[v], numbers);
              pairs[r][v] = i ? _mm256_add_epi16(pairs[r][v], products) : products;
              __asm__("" : "+x"(pairs[r][v]));  // else GCC reorders sums, and keeps products in memory
            }
          }
        }
        codes += SPAN * FOUR_BYTES;
        x += 4 * SPAN;
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < HALF; ++v) {
            const __m256i words = _mm256_madd_epi16(pairs[r][v], ones);
            sums[r][v] = span ? _mm256_add_epi32(sums[r][v], words) : words;
          }
      }
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < HALF; ++v) sums[r][v] = _mm256_setzero_si256();
      for (int i = 0; i < BLOCK_FOURS; ++i) {
        __m256i integers[HALF], magnitudes[HALF];
#pragma GCC unroll 2
        for (int v = 0; v < HALF; ++v) {
          integers[v] = (__m256i)(read<Words>(codes + 4 * WIDTH * v) ^ 0x80808080u);
          magnitudes[v] = _mm256_abs_epi8(integers[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const __m256i numbers = _mm256_set1_epi32(int32_t(word_at(x + r * stride)));
#pragma GCC unroll 2
          for (int v = 0; v < HALF; ++v) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitudes[v], _mm256_sign_epi8(numbers, integers[v]));
            sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones));
            __asm__("" : "+x"(sums[r][v]));
          }
        }
        codes += FOUR_BYTES;
        x += 4;
      }
    }
    auto add_block = [&](auto with_offsets) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Floats row_scale = everywhere(scales + r * stride);
#pragma GCC unroll 2
        for (int v = 0; v < HALF; ++v) {
          __m256i sum = sums[r][v];
          if constexpr (UNSIGNED<Codes>)
            sum = _mm256_add_epi32(sum, _mm256_set1_epi32(int32_t(word_at(lacking + r * stride))));
          float* const kept = totals + r * PANEL + WIDTH * v;
          Floats total = multiply_add(scale[v] * row_scale, (Floats)_mm256_cvtepi32_ps(sum),
                                      read<Floats>(kept));
          if constexpr (with_offsets) total = multiply_add(offset[v], everywhere(negated + r * stride), total);
          std::memcpy(kept, &total, sizeof total);
        }
      }
    };
    if (offsets)
      add_block(std::true_type{});
    else
      add_block(std::false_type{});
    scales += 4;
    lacking += 4;
    negated += 4;
    scale += PANEL_VECTORS;
    offset += PANEL_VECTORS;
  }
}

// The same with the numbers of rows and of a block's fours known at run time.
template <class Codes, int BLOCK_FOURS = 16, int ROWS = INTEGER_TILE_ROWS>
void multiply_run(const Run& run, RunRows rows, int64_t block_fours, int64_t count) {
  if constexpr (BLOCK_FOURS > 4)
    if (block_fours < BLOCK_FOURS) return multiply_run<Codes, BLOCK_FOURS / 2, ROWS>(run, rows, block_fours, count);
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_run<Codes, BLOCK_FOURS, ROWS - 1>(run, rows, block_fours, count);
  multiply_half<Codes, BLOCK_FOURS, ROWS>(run, rows, 0);
  rows.ahead += run.blocks * rows.ahead_bytes;
  multiply_half<Codes, BLOCK_FOURS, ROWS>(run, rows, PANEL / 2);
}

// All rows of a piece by a panel, or a slab of it. What is multiplied then, as many bytes at `next`, is fetched.
template <class Codes>
void multiply_in_runs(const IntegerTile& tile, const Piece& piece, const uint8_t* next) {
  constexpr int FOURS = Codes::INPUTS / 4, BYTES = Codes::STRIDE == 256 ? 128 : Codes::STRIDE;  // of a chunk
  constexpr int64_t RUN_CHUNKS = RUN_INPUTS / Codes::INPUTS;
  const int64_t block_fours = tile.block_chunks * FOURS;
  Run run;
  for (int64_t first = 0; first < tile.chunks; first += RUN_CHUNKS) {
    const int64_t chunks = std::min(RUN_CHUNKS, tile.chunks - first);
    run.decode<Codes>(tile, first, chunks);
    const int64_t times = piece.tiles * 2 * run.blocks;
    RunRows rows;
    rows.stride = tile.rows.stride;
    rows.field = 4 * tile.blocks;
    rows.ahead = next + first * BYTES;
    rows.ahead_bytes = (chunks * BYTES / 64 + times - 1) / times * 64;
    for (int64_t t = 0; t < piece.tiles; ++t) {
      const int64_t row = piece.row(t);
      const uint8_t* const from = tile.rows.first + row * tile.rows.stride;
      rows.numbers = from + tile.numbers + first * Codes::INPUTS;
      rows.scales = from + 4 * (tile.block + first / tile.block_chunks);
      rows.sums = tile.sums + row * PANEL;
      multiply_run<Codes>(run, rows, block_fours, piece.row(t + 1) - row);
      rows.ahead += times / piece.tiles * rows.ahead_bytes;
      // Nothing is fetched twice.
      if (rows.ahead >= next + (first + chunks) * BYTES) rows.ahead_bytes = 0;
    }
  }
}

}  // namespace tgi

#endif
