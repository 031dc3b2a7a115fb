// The inner loops of a product: a few rows times a panel of 32 outputs.
#pragma once

#include <type_traits>

#include "fp8.h"
#include "group_scales.h"

namespace tgi {

// Small integers as pairs of bfloat16 numbers.
TGI_INLINE Words pairs_of(Integers even, Integers odd) {
  Words first = (Words)__builtin_convertvector(even, Floats);
  Words second = (Words)__builtin_convertvector(odd, Floats);
  return first >> 16 | second;
}

// What a tile fetches into the cache: with each chunk a line, or two lines if steps are longer than one.
struct Ahead {
  const uint8_t* line;
  int64_t step;
  bool near;  // into the first level, if there is time for it; else into the second, which takes more at once
  const uint8_t* end;   // where `line` is replaced
  const uint8_t* then;  // by this
};

// A tile to compute: rows of x times some chunks of a panel, or of two that alternate.
struct Tile {
  const Input* x;
  int64_t x_stride;
  const uint8_t* panel;
  int64_t groups;        // of inputs that share a scale
  int64_t group_chunks;
  int64_t chunks;  // of all groups; the last one may be shorter
  float* sums;     // [rows][32], added to; those of the next panel sums_stride behind
  int64_t sums_stride;
  bool begins;     // sums are written, without being read first; not where inputs share a scale
  Ahead ahead;
  uint8_t* decoded;  // where to store the panel in bfloat16, with DECODING_ROWS or more; or null
  // Where inputs share a scale: sums += scale * product - offset * sum of x
  GroupScales scales;
  const float* x_sums;  // [groups][rows], negated; those of the next group x_sums_stride behind
  int64_t x_sums_stride;
  const bf16* table;    // of Int4Panel: what its codes stand for, all 16 twice
};

constexpr int DECODING_ROWS = 3;

// Panels in their formats, a chunk at a time: the bfloat16 numbers of a pair of inputs for the
// outputs of vector v of the panel.
struct Bf16Panel {
  static constexpr int PAIRS = 1;  // in a chunk
  static constexpr int BYTES = 128;
  static constexpr int STRIDE = 128;  // to the next chunk

  explicit Bf16Panel(const Tile&) {}

  TGI_INLINE Words decode(const uint8_t* chunk, int v, int) const {
    return read<Words>(chunk + 4 * WIDTH * v);
  }
};

struct Int8Panel {
  static constexpr int PAIRS = 2;
  static constexpr int BYTES = 128;
  static constexpr int STRIDE = 128;

  explicit Int8Panel(const Tile&) {}

  TGI_INLINE Words decode(const uint8_t* chunk, int v, int pair) const {
    const Integers codes = (Integers)(read<Words>(chunk + 4 * WIDTH * v) ^ 0x80808080u);
    return pair ? pairs_of(codes << 8 >> 24, codes >> 24) : pairs_of(codes << 24 >> 24, codes << 16 >> 24);
  }
};

// What codes stand for is looked up in registers.
struct Int4Panel {
  static constexpr int PAIRS = 4;
  static constexpr int BYTES = 128;
  static constexpr int STRIDE = 256;

#if defined(__AVX512BW__)
  // All 16 twice: a look-up takes five bits, the fifth is the next code's first.
  const __m512i numbers;

  explicit Int4Panel(const Tile& tile) : numbers(_mm512_loadu_si512(tile.table)) {}

  TGI_INLINE Words look_up(Words codes) const {
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, numbers);
  }
#elif defined(__AVX2__)
  __m256i low, high;  // bytes of the 16, twice

  explicit Int4Panel(const Tile& tile) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.table));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.table + 8));
    const __m128i byte = _mm_set1_epi16(0xff);
    low = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
    high = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  }

  TGI_INLINE Words look_up(Words codes) const {
    codes &= 0x000f000fu;
    const __m256i places = (__m256i)(codes | codes << 8);
    return (Words)_mm256_blendv_epi8(_mm256_shuffle_epi8(low, places),
                                     _mm256_shuffle_epi8(high, places),
                                     _mm256_set1_epi16(int16_t(0xff00)));
  }
#else
  const bf16* numbers;

  explicit Int4Panel(const Tile& tile) : numbers(tile.table) {}

  TGI_INLINE Words look_up(Words codes) const {
    for (int i = 0; i < WIDTH; ++i)
      codes[i] = numbers[codes[i] & 15] | uint32_t(numbers[codes[i] >> 16 & 15]) << 16;
    return codes;
  }
#endif

  TGI_INLINE Words decode(const uint8_t* chunk, int v, int pair) const {
    return look_up(read<Words>(chunk + 4 * WIDTH * v) >> (4 * pair));
  }
};

// e4m3: a number's bits are a bfloat16's but for the bias of the exponent. Numbers below the least
// normal one, multiples of 2^-9, are looked up.
struct Fp8Panel {
  static constexpr int PAIRS = 1;
  static constexpr int BYTES = 64;
  static constexpr int STRIDE = 64;

  explicit Fp8Panel(const Tile&) {}

  TGI_INLINE Words decode(const uint8_t* chunk, int v, int) const {
    const uint8_t* codes = chunk + 2 * WIDTH * v;
#if defined(__AVX512BW__)
    const __m512i code = _mm512_cvtepu8_epi16(read<__m256i>(codes));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    const __m512i normal =
        _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
    const __m512i small = _mm512_castsi128_si512(
        _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
    const __m512i number = _mm512_mask_permutexvar_epi16(
        normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
    return (Words)number | ((Words)code << 8 & 0x80008000u);
#elif defined(__AVX2__)
    const __m256i code = _mm256_cvtepu8_epi16(read<__m128i>(codes));
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i normal =
        _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(0x3c00));
    // Their upper and lower bytes, in words.
    const __m256i high = _mm256_set1_epi64x(0x3c3c3c3c3b3b3b00);
    const __m256i low = _mm256_set1_epi64x(0x60402000c0800000);
    const __m256i places = _mm256_or_si256(magnitude, _mm256_slli_epi16(magnitude, 8));
    const __m256i small =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(low, places), _mm256_shuffle_epi8(high, places),
                           _mm256_set1_epi16(int16_t(0xff00)));
    const __m256i number = _mm256_blendv_epi8(
        normal, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude));
    return (Words)number | ((Words)code << 8 & 0x80008000u);
#else
    Words pairs;
    for (int i = 0; i < WIDTH; ++i)
      pairs[i] = fp8_to_bf16(codes[2 * i], E4M3) | uint32_t(fp8_to_bf16(codes[2 * i + 1], E4M3)) << 16;
    return pairs;
#endif
  }
};

// So many of a panel's vectors, from `FIRST` on; or all of two panels'. Without GROUPS no inputs share a scale.
template <class Panel, int ROWS, int VECTORS, int FIRST = 0, bool GROUPS = true>
void multiply(const Tile& tile) {
  float* const to = tile.sums + WIDTH * FIRST;
  const int64_t sums_stride = tile.sums_stride;
  auto kept = [&](int r, int v) {
    return to + v / PANEL_VECTORS * sums_stride + r * PANEL + WIDTH * (v % PANEL_VECTORS);
  };
  const int64_t stride = tile.x_stride;
  const uint8_t* panel = tile.panel;
  Ahead ahead = tile.ahead;
  const bool two_lines = ahead.step > 64;
  uint8_t* decoded = tile.decoded;
  // Else loads come so soon after each other, and in order, that the processor fetches ahead by itself.
  constexpr bool FETCHES = VECTORS <= PANEL_VECTORS && (ROWS >= DECODING_ROWS || Panel::STRIDE > Panel::BYTES ||
                                                        Panel::BYTES > Bf16Panel::BYTES);
  // Every third row has a pointer: the two behind it are reached by its stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const Input* rows[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) rows[i] = tile.x + 3 * i * stride;

  const bool scaled = GROUPS && tile.scales.kind != NO_GROUPS, begins = tile.begins;
  // Where there are registers for the sums of a group and of all groups. They are added up alike.
  constexpr bool KEEPS = GROUPS && 2 * ROWS * VECTORS <= SUMS;
  Floats totals[KEEPS ? ROWS : 1][KEEPS ? VECTORS : 1];
  if constexpr (KEEPS) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) totals[r][v] = read<Floats>(kept(r, v));
  }
  const Panel format(tile);
  int64_t chunks = tile.chunks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = scaled || begins ? Floats{} : read<Floats>(kept(r, v));

    const int64_t now = chunks < tile.group_chunks ? chunks : tile.group_chunks;
    chunks -= now;
    for (const uint8_t* end = panel + now * Panel::STRIDE; panel != end; panel += Panel::STRIDE) {
      if (FETCHES && ahead.line) {
        if (ahead.line == ahead.end) ahead.line = ahead.then;
        if (ahead.near) {
          __builtin_prefetch(ahead.line, 0, 3);
          if (two_lines) __builtin_prefetch(ahead.line + 64, 0, 3);
        } else {
          __builtin_prefetch(ahead.line, 0, 2);
          if (two_lines) __builtin_prefetch(ahead.line + 64, 0, 2);
        }
#pragma GCC unroll 4
        for (int line = 2; line < Panel::BYTES / 64; ++line)
          if (ahead.step > 64 * line) __builtin_prefetch(ahead.line + 64 * line, 0, 2);
        ahead.line += ahead.step;
      }
#pragma GCC unroll 8
      for (int pair = 0; pair < Panel::PAIRS; ++pair) {
        Words weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
          weights[v] = format.decode(panel + v / PANEL_VECTORS * Panel::BYTES,
                                     v % PANEL_VECTORS + FIRST, pair);
        if constexpr (Panel::BYTES != Bf16Panel::BYTES * Panel::PAIRS && ROWS >= DECODING_ROWS) {
          if (decoded) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
              std::memcpy(decoded + 4 * WIDTH * (v + FIRST), &weights[v], sizeof(Words));
            decoded += 4 * PANEL;
          }
        }
#if defined(__AVX512F__)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          Words x = Words{} + pair_at(rows[r / 3] + (r % 3) * stride + 2 * pair);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_pairs(sums[r][v], x, weights[v]);
        }
#else
#pragma GCC unroll 2
        for (int which = 0; which < 2; ++which) {
          Floats numbers[VECTORS];
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) numbers[v] = numbers_of(weights[v], which);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            const Floats x = everywhere(rows[r / 3] + (r % 3) * stride + 2 * pair + which);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
              if constexpr (GROUPS)
                sums[r][v] = multiply_add(x, numbers[v], sums[r][v]);
              else
                accumulate(sums[r][v], x, numbers[v]);
            }
          }
        }
#endif
      }
#pragma GCC unroll 8
      for (int i = 0; i < POINTERS; ++i) rows[i] += 2 * Panel::PAIRS;
    }
#if !defined(__AVX512F__) && defined(__x86_64__)
    // Without this, GCC copies sums for what comes behind the loop within it, to memory.
    if constexpr (!GROUPS) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) __asm__("" : "+x"(sums[r][v]));
    }
#endif

    if (!scaled) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) std::memcpy(kept(r, v), &sums[r][v], sizeof(Floats));
      return;
    }
    Floats scale[VECTORS], offset[VECTORS];
    tile.scales.of_group<VECTORS, FIRST>(group, scale, offset);
    const float* x_sums = tile.x_sums + group * tile.x_sums_stride;
    auto add_group = [&](auto offsets) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          Floats total;
          if constexpr (KEEPS) total = totals[r][v];
          else total = read<Floats>(kept(r, v));
          total = multiply_add(scale[v], sums[r][v], total);
          if constexpr (offsets) total = multiply_add(offset[v], Floats{} + x_sums[r], total);
          if constexpr (KEEPS) totals[r][v] = total;
          else std::memcpy(kept(r, v), &total, sizeof total);
        }
    };
    if (tile.scales.offsets)
      add_group(std::true_type{});
    else
      add_group(std::false_type{});
  }
  if constexpr (KEEPS) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) std::memcpy(kept(r, v), &totals[r][v], sizeof(Floats));
  }
}

#if !defined(__AVX512F__)

// What is fetched so many chunks further on.
inline Ahead after(Ahead ahead, int64_t chunks) {
  if (!ahead.line || !ahead.step) return ahead;
  const int64_t left = ahead.end >= ahead.line ? (ahead.end - ahead.line) / ahead.step : chunks;
  if (chunks <= left) {
    ahead.line += chunks * ahead.step;
  } else {
    ahead.line = ahead.then + (chunks - left) * ahead.step;
    ahead.end = nullptr;
  }
  return ahead;
}

// The same a group at a time, where a group's sums take all the registers there are.
template <class Panel, int ROWS, int VECTORS, int FIRST = 0>
void multiply_groups(const Tile& tile) {
  alignas(32) float sums[ROWS * PANEL];
  Tile part = tile;
  part.scales.kind = NO_GROUPS;
  part.begins = true;
  part.groups = 1;
  part.sums = sums;
  int64_t left = tile.chunks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    const int64_t chunks = left < tile.group_chunks ? left : tile.group_chunks;
    left -= chunks;
    part.chunks = part.group_chunks = chunks;
    multiply<Panel, ROWS, VECTORS, FIRST, false>(part);
    part.x += chunks * 2 * Panel::PAIRS;
    part.panel += chunks * Panel::STRIDE;
    part.ahead = after(part.ahead, chunks);
    if (part.decoded) part.decoded += chunks * Panel::PAIRS * 4 * PANEL;

    Floats scale[VECTORS], offset[VECTORS];
    tile.scales.of_group<VECTORS, FIRST>(group, scale, offset);
    const float* x_sums = tile.x_sums + group * tile.x_sums_stride;
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = r * PANEL + WIDTH * (v + FIRST);
        Floats total = multiply_add(scale[v], read<Floats>(sums + at), read<Floats>(tile.sums + at));
        if (tile.scales.offsets) total = multiply_add(offset[v], everywhere(x_sums + r), total);
        std::memcpy(tile.sums + at, &total, sizeof total);
      }
  }
}

#endif

}  // namespace tgi
