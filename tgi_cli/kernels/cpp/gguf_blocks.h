// The blocks of GGUF's quantized types: where their codes and scales are.
// https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace tgi {
namespace gguf {

// What scales are stored as in a packed matrix (Matrix).
enum Scales { HALVES, HALVES_AND_MINIMA, TWO_LEVELS, TWO_LEVELS_AND_MINIMA, FLOATS };

// Scales of a block. Types with one scale a group have a group a block.
struct BlockScales {
  uint16_t half, minimum_half;  // float16
  float wide, wide_minimum;     // of all groups; FLOATS: the scale
  int8_t codes[16];
  uint8_t minima[16];
};

inline uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  return half;
}

// COUNT bytes of fields of BITS bits: the lowest of all bytes first.
template <int BITS, int COUNT>
inline void fields(const uint8_t* from, uint8_t* to) {
  for (int shift = 0; shift < 8; shift += BITS, to += COUNT)
    for (int i = 0; i < COUNT; ++i) to[i] = uint8_t(from[i] >> shift & ((1 << BITS) - 1));
}

// The same, above bits that are there, and in numbers that were read before.
template <int BITS, int COUNT, int ABOVE>
inline void add_fields(const uint8_t* from, uint8_t* to) {
  for (int shift = 0; shift < 8; shift += BITS, to += COUNT)
    for (int i = 0; i < COUNT; ++i) to[i] |= uint8_t((from[i] >> shift & ((1 << BITS) - 1)) << ABOVE);
}

inline void add_to_all(uint8_t* codes, int count, int what) {
  for (int i = 0; i < count; ++i) codes[i] = uint8_t(codes[i] + what);
}

// The fifth bits of 32 codes, in order.
inline void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((bits >> i & 1) << 4);
}

// 8 scales and 8 minima of 6 bits, in 12 bytes.
inline void scales_of_k(const uint8_t* from, BlockScales& scales) {
  for (int i = 0; i < 4; ++i) {
    scales.codes[i] = int8_t(from[i] & 63);
    scales.minima[i] = from[4 + i] & 63;
    scales.codes[4 + i] = int8_t((from[8 + i] & 15) | from[i] >> 6 << 4);
    scales.minima[4 + i] = uint8_t(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
  }
}

// Each type has decode(block, codes [ELEMENTS], scales). Codes are those that panels store, of integers
// with the middle of the panel's format (Matrix::middle) for 0, or for 0 before a minimum is taken off.

struct Q4_0 {
  static constexpr int ELEMENTS = 32, BYTES = 18, GROUP = 32;
  static constexpr Scales SCALES = HALVES;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block);
    fields<4, 16>(block + 2, codes);
  }
};

struct Q4_1 {
  static constexpr int ELEMENTS = 32, BYTES = 20, GROUP = 32;
  static constexpr Scales SCALES = HALVES_AND_MINIMA;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block);
    scales.minimum_half = half_at(block + 2) ^ 0x8000;
    fields<4, 16>(block + 4, codes);
  }
};

struct Q5_0 {
  static constexpr int ELEMENTS = 32, BYTES = 22, GROUP = 32;
  static constexpr Scales SCALES = HALVES;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block);
    fields<4, 16>(block + 6, codes);
    add_fifth_bits(block + 2, codes);
  }
};

struct Q5_1 {
  static constexpr int ELEMENTS = 32, BYTES = 24, GROUP = 32;
  static constexpr Scales SCALES = HALVES_AND_MINIMA;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block);
    scales.minimum_half = half_at(block + 2) ^ 0x8000;
    fields<4, 16>(block + 8, codes);
    add_fifth_bits(block + 4, codes);
  }
};

struct Q8_0 {
  static constexpr int ELEMENTS = 32, BYTES = 34, GROUP = 32;
  static constexpr Scales SCALES = HALVES;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block);
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
  }
};

struct Q2_K {
  static constexpr int ELEMENTS = 256, BYTES = 84, GROUP = 16;
  static constexpr Scales SCALES = TWO_LEVELS_AND_MINIMA;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block + 80));
    scales.wide_minimum = half_to_float(half_at(block + 82));
    for (int i = 0; i < 16; ++i) {
      scales.codes[i] = int8_t(block[i] & 15);
      scales.minima[i] = block[i] >> 4;
    }
    fields<2, 32>(block + 16, codes);
    fields<2, 32>(block + 48, codes + 128);
  }
};

struct Q3_K {
  static constexpr int ELEMENTS = 256, BYTES = 110, GROUP = 16;
  static constexpr Scales SCALES = TWO_LEVELS;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block + 108));
    uint8_t numbers[16];
    fields<4, 8>(block + 96, numbers);
    add_fields<2, 4, 4>(block + 104, numbers);
    for (int i = 0; i < 16; ++i) scales.codes[i] = int8_t(numbers[i] - 32);
    fields<2, 32>(block + 32, codes);
    fields<2, 32>(block + 64, codes + 128);
    add_fields<1, 32, 2>(block, codes);
    add_to_all(codes, ELEMENTS, 8 - 4);
  }
};

struct Q4_K {
  static constexpr int ELEMENTS = 256, BYTES = 144, GROUP = 32;
  static constexpr Scales SCALES = TWO_LEVELS_AND_MINIMA;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block));
    scales.wide_minimum = half_to_float(half_at(block + 2));
    scales_of_k(block + 4, scales);
    for (int i = 0; i < 4; ++i) fields<4, 32>(block + 16 + 32 * i, codes + 64 * i);
  }
};

struct Q5_K {
  static constexpr int ELEMENTS = 256, BYTES = 176, GROUP = 32;
  static constexpr Scales SCALES = TWO_LEVELS_AND_MINIMA;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block));
    scales.wide_minimum = half_to_float(half_at(block + 2));
    scales_of_k(block + 4, scales);
    for (int i = 0; i < 4; ++i) fields<4, 32>(block + 48 + 32 * i, codes + 64 * i);
    add_fields<1, 32, 4>(block + 16, codes);
  }
};

struct Q6_K {
  static constexpr int ELEMENTS = 256, BYTES = 210, GROUP = 16;
  static constexpr Scales SCALES = TWO_LEVELS;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block + 208));
    std::memcpy(scales.codes, block + 192, 16);
    fields<4, 64>(block, codes);
    fields<4, 64>(block + 64, codes + 128);
    add_fields<2, 32, 4>(block + 128, codes);
    add_fields<2, 32, 4>(block + 160, codes + 128);
  }
};

struct IQ4_XS {
  static constexpr int ELEMENTS = 256, BYTES = 136, GROUP = 32;
  static constexpr Scales SCALES = TWO_LEVELS;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = half_to_float(half_at(block));
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
      scales.codes[i] = int8_t((low | high << 4) - 32);
    }
    for (int i = 0; i < 8; ++i) fields<4, 16>(block + 8 + 16 * i, codes + 32 * i);
  }
};

struct MXFP4 {
  static constexpr int ELEMENTS = 32, BYTES = 17, GROUP = 32;
  static constexpr Scales SCALES = FLOATS;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.wide = std::ldexp(1.0f, int(block[0]) - 127);
    fields<4, 16>(block + 1, codes);
  }
};

struct TQ1_0 {
  static constexpr int ELEMENTS = 256, BYTES = 54, GROUP = 256;
  static constexpr Scales SCALES = HALVES;
  // Five digits of base 3 in a byte, the highest first; a byte is a fraction of 256.
  static void digits(const uint8_t* from, int count, int width, uint8_t* to) {
    for (int power = 1; count; --count, power *= 3, to += width)
      for (int i = 0; i < width; ++i) to[i] = uint8_t(uint8_t(from[i] * power) * 3 >> 8);
  }
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block + 52);
    digits(block, 5, 32, codes);
    digits(block + 32, 5, 16, codes + 160);
    digits(block + 48, 4, 4, codes + 240);
    add_to_all(codes, ELEMENTS, 8 - 1);
  }
};

struct TQ2_0 {
  static constexpr int ELEMENTS = 256, BYTES = 66, GROUP = 256;
  static constexpr Scales SCALES = HALVES;
  static void decode(const uint8_t* block, uint8_t* codes, BlockScales& scales) {
    scales.half = half_at(block + 64);
    fields<2, 32>(block, codes);
    fields<2, 32>(block + 32, codes + 128);
    add_to_all(codes, ELEMENTS, 8 - 1);
  }
};

}  // namespace gguf
}  // namespace tgi
