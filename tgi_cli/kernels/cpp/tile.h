// The inner loops of a product: a few rows times a panel of 32 outputs.
#pragma once

#include "fp8.h"
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

// Scales that are float16 or in two levels (Matrix), from a panel's first group on.
struct Levels {
  const uint8_t* codes;     // null: scales are float32
  const uint8_t* minima;    // or null
  const float* scales;      // of supergroups; null: codes are float16
  const float* min_scales;  // or null
  int64_t code_stride, scale_stride;  // to the next panel's
  int64_t group;            // the first one that is multiplied
  int shift;
  float middle;

  Levels() = default;
  Levels(const Matrix& weight, int64_t panel, int64_t first)
      : codes(nullptr),
        minima(nullptr),
        scales(nullptr),
        min_scales(nullptr),
        code_stride(weight.groups() * PANEL),
        scale_stride(weight.supergroups() * PANEL),
        group(first),
        shift(weight.super_shift),
        middle(float(weight.middle())) {
    if (!weight.scales) code_stride *= 2;
    codes = static_cast<const uint8_t*>(weight.scale_codes) + panel * code_stride;
    if (weight.minimum_codes) minima = static_cast<const uint8_t*>(weight.minimum_codes) + panel * code_stride;
    if (weight.scales) scales = weight.scales + panel * scale_stride;
    if (weight.zeros) min_scales = weight.zeros + panel * scale_stride;
  }

  // The scales of vector v of a panel's outputs, of the index-th group from `group` on.
  TGI_INLINE Floats scale(int64_t index, int64_t panel, int v) const {
    const int64_t at = group + index;
    if (!scales) return floats_of_halves(codes + panel * code_stride + 2 * (at * PANEL + WIDTH * v));
    return read<Floats>(scales + panel * scale_stride + (at >> shift) * PANEL + WIDTH * v) *
           floats_of<true>(codes + panel * code_stride + at * PANEL + WIDTH * v);
  }
  // What times the sum of x is taken off: the minima, less what codes are short of their middle.
  TGI_INLINE Floats offset(int64_t index, int64_t panel, int v, Floats scale) const {
    const int64_t at = group + index;
    const Floats minimum =
        min_scales ? read<Floats>(min_scales + panel * scale_stride + (at >> shift) * PANEL + WIDTH * v) *
                         floats_of<false>(minima + panel * code_stride + at * PANEL + WIDTH * v)
                   : floats_of_halves(minima + panel * code_stride + 2 * (at * PANEL + WIDTH * v));
    return minimum - scale * middle;
  }
};

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
  const bf16* x;
  int64_t x_stride;
  const uint8_t* panel;
  int64_t groups;        // of inputs that share a scale
  int64_t group_chunks;
  int64_t chunks;  // of all groups; the last one may be shorter
  bool first;      // the sums are to be started
  float* sums;     // [rows][32], those of the next panel sums_stride behind
  int64_t sums_stride;
  Ahead ahead;
  uint8_t* decoded;  // where to store the panel in bfloat16, with TILE_ROWS / 2 rows or more; or null
  // Where inputs share a scale: sums += scale * (product - zero * sum of x)
  const float* scales;  // [groups][32], those of the next panel scales_stride behind; or null
  const float* zeros;   // like scales, or null
  int64_t scales_stride;
  const float* x_sums;  // [rows][groups]
  Levels levels;        // if it has codes: instead of scales and zeros
  const bf16* table;    // of Int4Panel: what its codes stand for, all 16 twice
};

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

// So many of a panel's vectors, from `FIRST` on; or all of two panels'.
template <class Panel, int ROWS, int VECTORS, int FIRST = 0>
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
  // Else loads come so soon after each other that the processor fetches ahead by itself.
  constexpr bool FETCHES = VECTORS <= PANEL_VECTORS && (ROWS >= TILE_ROWS / 2 || Panel::STRIDE > Panel::BYTES);
  // Every third row has a pointer: the two behind it are reached by its stride.
  constexpr int POINTERS = (ROWS + 2) / 3;
  const bf16* rows[POINTERS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTERS; ++i) rows[i] = tile.x + 3 * i * stride;

  bool first = tile.first;
  const bool two_levels = tile.levels.codes;
  const bool scaled = tile.scales || two_levels;
  const Panel format(tile);
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
      if constexpr (FETCHES) {
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
        if constexpr (Panel::BYTES != Bf16Panel::BYTES * Panel::PAIRS && ROWS >= TILE_ROWS / 2) {
          if (decoded) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
              std::memcpy(decoded + 4 * WIDTH * (v + FIRST), &weights[v], sizeof(Words));
            decoded += 4 * PANEL;
          }
        }
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
    if (two_levels) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t of = v / PANEL_VECTORS, vector = v % PANEL_VECTORS + FIRST;
        const Floats scale = tile.levels.scale(group, of, int(vector));
        Floats offset{};
        if (tile.levels.minima) offset = tile.levels.offset(group, of, int(vector), scale);
        const float* x_sums = tile.x_sums + group;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          Floats sum = multiply_add(scale, sums[r][v], first ? Floats{} : read<Floats>(kept(r, v)));
          if (tile.levels.minima) sum = multiply_add(offset, Floats{} - x_sums[r * tile.groups], sum);
          std::memcpy(kept(r, v), &sum, sizeof sum);
        }
      }
      first = false;
      continue;
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
