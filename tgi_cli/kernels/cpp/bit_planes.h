// Panels of codes of 5 and 6 bits: four lower bits as in panels of 4-bit codes, upper ones behind them.
//
// A chunk has 16 inputs (5 bits) or 8 (6 bits). Words of an output are, for each 8 inputs,
// [2 x 16 outputs][word 0 or 1][4 codes' lower bits], as of int4 (packing.cpp); read as bytes, their lower
// halves are the codes of inputs 0, 4, 1 and 5, their upper halves those of 2, 6, 3 and 7. Then come 64
// bytes, a word for outputs i and i + 16: its bytes have the upper bits of the codes in the same bytes,
// first all of output i, in the order of these fours, then those of output i + 16.
#pragma once

#include "tile.h"

namespace tgi {

template <int BITS>
struct BitPlanes {
  static constexpr int UPPER = BITS - 4;       // upper bits of a code
  static constexpr int INPUTS = 16 / UPPER;    // of a chunk
  static constexpr int FOURS = INPUTS / 4;     // of an output, in a chunk
  static constexpr int LOWER_BYTES = 16 * INPUTS;
  static constexpr int BYTES = LOWER_BYTES + 64;
  static constexpr uint32_t MASK = UPPER == 2 ? 0x3 : 0x1;

  // How far the upper bits of a four are to be shifted down, to be in bits 4 and 5 of bytes.
  static TGI_INLINE constexpr int shift(int half, int four) { return UPPER * (half * FOURS + four) - 4; }
};

// Words whose lowest bits are the upper bits of a code in their fifth and sixth, after a shift to the right.
template <class Vector>
TGI_INLINE Vector shifted(Vector words, int by) {
  return by >= 0 ? words >> uint32_t(by) : words << uint32_t(-by);
}

// Decodes pairs of codes to bfloat16, for products in bfloat16 (tile.h).
template <int BITS>
struct BitPlanesPanel {
  using Planes = BitPlanes<BITS>;
  static constexpr int PAIRS = Planes::INPUTS / 2;
  static constexpr int BYTES = Planes::BYTES;
  static constexpr int STRIDE = BYTES;
  static constexpr int PER_HALF = 16 / WIDTH;  // vectors of 16 outputs

#if defined(__AVX512BW__)
  __m512i numbers[2];  // that codes stand for

  explicit BitPlanesPanel(const Tile&) {
    alignas(64) bf16 table[64];
    for (int code = 0; code < 64; ++code) table[code] = to_bf16(float(code - (1 << (BITS - 1))));
    numbers[0] = _mm512_load_si512(table);
    numbers[1] = _mm512_load_si512(table + 32);
  }

  // A look-up takes the lower BITS bits of an index.
  TGI_INLINE Words decode(const uint8_t* chunk, int v, int pair) const {
    const __m512i lower = (__m512i)(read<Words>(chunk + pair / 4 * 128 + 64 * v) >> uint32_t(pair % 4 * 4));
    const __m512i upper = (__m512i)upper_bits(chunk, v, pair);
    const __m512i codes = _mm512_ternarylogic_epi32(
        _mm512_set1_epi32(int32_t(0x00010001u * (Planes::MASK << 4))), upper, lower, 0xca);
    if constexpr (BITS == 5) return (Words)_mm512_permutexvar_epi16(codes, numbers[0]);
    return (Words)_mm512_permutex2var_epi16(numbers[0], codes, numbers[1]);
  }
#else
  explicit BitPlanesPanel(const Tile&) {}

  TGI_INLINE Words decode(const uint8_t* chunk, int v, int pair) const {
    const uint8_t* lower = chunk + pair / 4 * 128 + 4 * WIDTH * v;
    const Words codes = (read<Words>(lower) >> uint32_t(pair % 4 * 4) & 0x000f000fu) |
                        (upper_bits(chunk, v, pair) & 0x00010001u * (Planes::MASK << 4));
    constexpr int MIDDLE = 1 << (BITS - 1);
    return pairs_of((Integers)(codes & 0xffffu) - MIDDLE, (Integers)(codes >> 16) - MIDDLE);
  }
#endif

 private:
  // With the pair's upper bits in bits 4 and 5 of both halves of words.
  TGI_INLINE Words upper_bits(const uint8_t* chunk, int v, int pair) const {
    const Words words = read<Words>(chunk + Planes::LOWER_BYTES + 4 * WIDTH * (v % PER_HALF));
    const int four = pair / 4 * 2 + pair % 2, byte = pair % 4 / 2;
    return shifted(words, Planes::shift(v / PER_HALF, four) + 8 * byte);
  }
};

// Reads fours of codes as bytes, for products in integers (integer_tile.h).
template <int BITS>
struct BitPlanesCodes {
  using Planes = BitPlanes<BITS>;
  static constexpr int INPUTS = Planes::INPUTS;
  static constexpr int STRIDE = Planes::BYTES;
  static constexpr int LARGEST = (1 << BITS) - 1;

  static TGI_INLINE Words four(const uint8_t* chunk, int v, int which) {
    constexpr int PER_HALF = 16 / WIDTH;  // vectors of 16 outputs
    const Words words = read<Words>(chunk + which / 2 * 128 + 4 * WIDTH * v);
    const Words lower = (which % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    const Words upper = shifted(read<Words>(chunk + Planes::LOWER_BYTES + 4 * WIDTH * (v % PER_HALF)),
                                Planes::shift(v / PER_HALF, which));
    return lower | (upper & 0x01010101u * (Planes::MASK << 4));
  }
};

}  // namespace tgi
