// Products of a few rows of integers on processors with AVX2, which multiplies bytes in pairs, or with AVX-VNNI, which
// multiplies them in fours.
#pragma once

#include "integer_tile.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace tgi {

// Whether sums of 32 bits take four products at once, of unsigned codes of 8 bits as well.
#if defined(__AVXVNNI__)
constexpr bool ADDS_FOURS = true;
#else
constexpr bool ADDS_FOURS = false;
#endif

// Adds the products of fours of codes and numbers in each lane.
TGI_INLINE __m256i add_fours([[maybe_unused]] __m256i codes, [[maybe_unused]] __m256i numbers, __m256i sum) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, codes, numbers);
#else
  return sum;
#endif
}

// Whether codes are multiplied as they are, or less 128.
template <class Codes>
constexpr bool UNSIGNED = ADDS_FOURS || Codes::LARGEST < 128;

// Products of fours of codes and numbers in each lane, added up in pairs of 16 bits.
template <class Codes>
TGI_INLINE __m256i pairs_of_four(Words codes, uint32_t four) {
  const __m256i numbers = _mm256_set1_epi32(int32_t(four));
  if constexpr (Codes::LARGEST < 128) return _mm256_maddubs_epi16((__m256i)codes, numbers);
  // Unsigned codes of 8 bits would overflow: magnitudes of codes less 128 are multiplied, signs go to the numbers.
  const __m256i integers = (__m256i)(codes ^ 0x80808080u);
  return _mm256_maddubs_epi16(_mm256_abs_epi8(integers), _mm256_sign_epi8(numbers, integers));
}

// So many vectors of a panel, from `FIRST` on; or all of two panels that alternate.
template <class Codes, int ROWS, int VECTORS, int FIRST = 0>
void multiply_integers(const IntegerTile& tile) {
  constexpr int FOURS = Codes::INPUTS / 4;  // of a chunk
  // Fours whose products are added up in 16 bits, which hold 1, 2 and 4 of 8-, 6- and 5-bit codes. 8 of 4-bit
  // codes would do, but have no registers.
  constexpr int SPAN = Codes::LARGEST > 127 ? 1 : Codes::LARGEST > 31 ? 2 : 4;
  constexpr int SPAN_CHUNKS = SPAN / FOURS;
  constexpr int LINES = (Codes::STRIDE == 256 ? 32 * VECTORS : Codes::STRIDE * VECTORS / PANEL_VECTORS + 63) / 64;
  // Every third row has a pointer: the two behind it are reached by the stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const int64_t stride = tile.rows.stride, field = 4 * tile.blocks;
  const uint8_t* numbers[POINTERS];
#pragma GCC unroll 4
  for (int i = 0; i < POINTERS; ++i) numbers[i] = tile.rows.first + tile.numbers + 3 * i * stride;
  const uint8_t* scale_of = tile.rows.first + 4 * tile.block;
  const uint8_t* panel = tile.panel;
  const bool grouped = tile.scales.kind != NO_GROUPS;
  const __m256i ones = _mm256_set1_epi16(1);
  Ahead ahead = tile.ahead;
  int64_t in_group = 0, group = 0;
  auto kept = [&](int r, int v) {
    return tile.sums + v / PANEL_VECTORS * tile.sums_stride + r * PANEL + WIDTH * (v % PANEL_VECTORS + FIRST);
  };

  for (int64_t left = tile.chunks; left > 0; left -= tile.block_chunks) {
    const int64_t chunks = left < tile.block_chunks ? left : tile.block_chunks;
    Words sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = UNSIGNED<Codes> ? Words{} + word_at(scale_of + r * stride + field) : Words{};

    auto add_chunks = [&](auto count) __attribute__((always_inline)) {
      constexpr int TOGETHER = decltype(count)::value * FOURS;
#pragma GCC unroll 2
      for (int chunk = 0; chunk < decltype(count)::value; ++chunk) {
        if (ahead.line == ahead.end) ahead.line = ahead.then;
#pragma GCC unroll 8
        for (int line = 0; line < LINES; ++line)
          if (line == 0 || ahead.step > 64 * line) __builtin_prefetch(ahead.line + 64 * line, 0, 2);
        ahead.line += ahead.step;
      }
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        Words codes[TOGETHER];
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; ++i)
          codes[i] = Codes::four(panel + i / FOURS * Codes::STRIDE + v / PANEL_VECTORS * 128,
                                 v % PANEL_VECTORS + FIRST, i % FOURS);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const uint8_t* from = numbers[r / 3] + (r % 3) * stride;
          __asm__ volatile("" : "+r"(from));  // else GCC keeps numbers for the next vector, in memory
          if constexpr (ADDS_FOURS) {
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i)
              sums[r][v] = (Words)add_fours((__m256i)codes[i], _mm256_set1_epi32(int32_t(word_at(from + 4 * i))),
                                            (__m256i)sums[r][v]);
            continue;
          }
          __m256i pairs = pairs_of_four<Codes>(codes[0], word_at(from));
#pragma GCC unroll 4
          for (int i = 1; i < TOGETHER; ++i)
            pairs = _mm256_add_epi16(pairs, pairs_of_four<Codes>(codes[i], word_at(from + 4 * i)));
          sums[r][v] += (Words)_mm256_madd_epi16(pairs, ones);
        }
      }
      panel += decltype(count)::value * Codes::STRIDE;
#pragma GCC unroll 4
      for (int i = 0; i < POINTERS; ++i) numbers[i] += 4 * TOGETHER;
    };
    int64_t rest = chunks;
    for (; rest >= SPAN_CHUNKS; rest -= SPAN_CHUNKS) add_chunks(std::integral_constant<int, SPAN_CHUNKS>{});
    if constexpr (SPAN_CHUNKS > 1)
      for (; rest; --rest) add_chunks(std::integral_constant<int, 1>{});

    Floats scale[VECTORS], offset[VECTORS];
    if (grouped) tile.scales.of_group<VECTORS, FIRST>(group, scale, offset);
    auto add_block = [&](auto in_groups, auto offsets) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Floats row_scale = everywhere(scale_of + r * stride);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
          Floats total = read<Floats>(kept(r, v));
          const Floats sum = __builtin_convertvector((Integers)sums[r][v], Floats);
          Floats factor = row_scale;
          if constexpr (in_groups) factor = scale[v] * row_scale;
          total = multiply_add(factor, sum, total);
          if constexpr (offsets)
            total = multiply_add(offset[v], everywhere(scale_of + r * stride + 2 * field), total);
          std::memcpy(kept(r, v), &total, sizeof total);
        }
      }
    };
    if (tile.scales.offsets)
      add_block(std::true_type{}, std::true_type{});
    else if (grouped)
      add_block(std::true_type{}, std::false_type{});
    else
      add_block(std::false_type{}, std::false_type{});

    scale_of += 4;
    if (grouped && ++in_group == tile.group_blocks) {
      in_group = 0;
      ++group;
    }
  }
}

// All vectors of a panel from `FIRST` on, so many at a time. Each part fetches as much of what is next.
template <class Codes, int ROWS, int VECTORS, int FIRST = 0>
void multiply_parts(const IntegerTile& tile) {
  IntegerTile part = tile;
  if constexpr (VECTORS < PANEL_VECTORS) {
    const Ahead& all = tile.ahead;
    part.ahead.line = (all.then ? all.then : all.line) + tile.chunks * all.step * FIRST / PANEL_VECTORS;
    part.ahead.step = all.step * VECTORS / PANEL_VECTORS;
    part.ahead.end = nullptr;
  }
  multiply_integers<Codes, ROWS, VECTORS, FIRST>(part);
  if constexpr (FIRST + VECTORS < PANEL_VECTORS) multiply_parts<Codes, ROWS, VECTORS, FIRST + VECTORS>(tile);
}

// Of so few rows, two panels that alternate are multiplied at once.
constexpr int64_t TWO_INTEGER_PANELS_ROWS = 1;

// Of more rows, what decodes codes once for all of them is faster (integer_blocks.h).
constexpr int FEW_ROWS = 3;

// The same with the number of rows known at run time.
template <class Codes, int PLANES, int PANELS = 1, int ROWS = FEW_ROWS>
void multiply_integer_rows(const IntegerTile& tile, int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_integer_rows<Codes, PLANES, PANELS, ROWS - 1>(tile, rows);
  // As many sums as there are registers beside those of codes.
  constexpr int VECTORS = ROWS == 1 ? PANELS * PANEL_VECTORS : ROWS == 2 ? PANEL_VECTORS : 2;
  if constexpr (PLANES == 1) multiply_parts<Codes, ROWS, VECTORS>(tile);
}

}  // namespace tgi

#endif
