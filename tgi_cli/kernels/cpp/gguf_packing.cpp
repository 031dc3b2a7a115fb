// Blocks of GGUF's types into panels of 32 outputs (packing.cpp has the order of a panel's numbers), without
// codes or scales of the whole weight in between.
#include "gguf_blocks.h"
#include "matrix.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Inputs that are decoded at a time, of all outputs of a panel: one block of the largest types.
constexpr int STRETCH = 256;

// The lower BITS bits of eight bytes as a word: of the bytes 0, 2, 4 and 6 in its lower half, the first ones
// lowest, two in each byte; of the others in its upper half.
template <int BITS>
inline uint32_t squeezed(uint64_t bytes) {
  constexpr uint64_t ONE = 0x0001000100010001u * ((1u << BITS) - 1), TWO = 0x0000000100000001u * ((1u << 2 * BITS) - 1);
  constexpr uint32_t FOUR = 0x0101u * ((1u << 2 * BITS) - 1);
  auto half = [](uint64_t fields) {
    fields &= ONE;
    fields = (fields | fields >> (16 - BITS)) & TWO;
    return uint32_t(fields | fields >> 24) & FOUR;
  };
  return half(bytes) | half(bytes >> 8) << 16;
}

// Codes of one output, in whole eights, to their places in a panel from `to` on.
void put_codes(const Matrix& matrix, const uint8_t* codes, int count, int output, uint8_t* to) {
  uint64_t eights[STRETCH / 8];
  uint32_t words[STRETCH / 8];
  std::memcpy(eights, codes, size_t(count));
  const int number = count / 8;
  if (matrix.format == INT8) {
    for (int i = 0; i < count / 4; ++i) std::memcpy(to + 128 * i + 4 * output, codes + 4 * i, 4);
    return;
  }
  for (int i = 0; i < number; ++i) words[i] = squeezed<4>(eights[i]);
  if (matrix.format == INT4) {
    for (int i = 0; i < number; ++i) std::memcpy(to + 256 * i + 4 * output, &words[i], 4);
    return;
  }
  const int half = output / 16;
  // Of the first 16 outputs, they replace what was there.
  auto put_upper = [&](uint8_t* at, uint32_t word) {
    uint32_t before = 0;
    if (half) std::memcpy(&before, at, 4);
    word |= before;
    std::memcpy(at, &word, 4);
  };
  if (matrix.format == INT6) {
    for (int i = 0; i < number; ++i) {
      uint8_t* chunk = to + 192 * i;
      std::memcpy(chunk + 4 * output, &words[i], 4);
      put_upper(chunk + 128 + output % 16 * 4, squeezed<2>(eights[i] >> 4) << 4 * half);
    }
    return;
  }
  for (int i = 0; i < number; i += 2) {
    uint8_t* chunk = to + 160 * i;
    std::memcpy(chunk + 4 * output, &words[i], 4);
    std::memcpy(chunk + 128 + 4 * output, &words[i + 1], 4);
    const uint32_t upper = squeezed<1>(eights[i] >> 4) | squeezed<1>(eights[i + 1] >> 4) << 2;
    put_upper(chunk + 256 + output % 16 * 4, upper << 4 * half);
  }
}

template <class Item>
Item* writable(const void* memory) {
  return static_cast<Item*>(const_cast<void*>(memory));
}

// Scales of a block to a panel's; codes of groups that a scale of 0 makes constant become 0, as the values
// do not depend on them.
template <class Type>
void put_scales(const Matrix& matrix, int64_t panel, int64_t block, int output, const gguf::BlockScales& scales,
                uint8_t* codes) {
  using namespace gguf;
  constexpr int GROUPS = Type::ELEMENTS / Type::GROUP;
  const int64_t at = (panel * matrix.groups() + block * GROUPS) * PANEL + output;
  auto clear = [&](int group) {
    if (codes) std::memset(codes + group * Type::GROUP, 0, Type::GROUP);
  };
  if constexpr (Type::SCALES == FLOATS) {
    writable<float>(matrix.scales)[at] = scales.wide;
  } else if constexpr (Type::SCALES == HALVES || Type::SCALES == HALVES_AND_MINIMA) {
    writable<uint16_t>(matrix.scale_codes)[at] = scales.half;
    if constexpr (Type::SCALES == HALVES_AND_MINIMA) {
      writable<uint16_t>(matrix.minimum_codes)[at] = scales.minimum_half;
      if (half_to_float(scales.half) == 0) clear(0);
    }
  } else {
    const int64_t wide = (panel * matrix.supergroups() + block) * PANEL + output;
    writable<float>(matrix.scales)[wide] = scales.wide;
    for (int group = 0; group < GROUPS; ++group)
      writable<int8_t>(matrix.scale_codes)[at + group * PANEL] = scales.codes[group];
    if constexpr (Type::SCALES == TWO_LEVELS_AND_MINIMA) {
      writable<float>(matrix.zeros)[wide] = scales.wide_minimum;
      for (int group = 0; group < GROUPS; ++group) {
        writable<uint8_t>(matrix.minimum_codes)[at + group * PANEL] = scales.minima[group];
        if (scales.wide * float(scales.codes[group]) == 0) clear(group);
      }
    }
  }
}

template <class Type>
void pack_type(const Matrix& matrix, const uint8_t* const* rows, int threads) {
  const int64_t chunk_bytes = matrix.chunk_stride(), chunk = matrix.chunk_inputs();
  share_out(threads, matrix.panels(), [&](int64_t panel, int) {
    uint8_t* to = const_cast<uint8_t*>(matrix.panel(panel));
    for (int64_t from = 0; from < matrix.in; from += STRETCH) {
      const int count = int(matrix.in - from < STRETCH ? matrix.in - from : STRETCH);
      uint8_t* const place = to + from / chunk * chunk_bytes;
      for (int output = 0; output < int(PANEL); ++output) {
        uint8_t codes[STRETCH];
        const bool is_there = output % 16 < matrix.outputs(panel, output / 16);
        const uint8_t* row = is_there ? rows[matrix.first_output(panel, output / 16) + output % 16] : nullptr;
        if (!is_there) std::memset(codes, matrix.middle(), sizeof codes);
        for (int64_t block = from / Type::ELEMENTS; block * Type::ELEMENTS < from + count; ++block) {
          gguf::BlockScales scales{};
          uint8_t* own = codes + (block * Type::ELEMENTS - from);
          if (is_there) Type::decode(row + block * Type::BYTES, own, scales);
          put_scales<Type>(matrix, panel, block, output, scales, is_there ? own : nullptr);
        }
        put_codes(matrix, codes, count, output, place);
      }
    }
  });
}

}  // namespace
}  // namespace tgi

// Pack `rows`, an address for each output, of the type with that number in GGUF. The matrix has memory for
// the type's codes and scales, and whole blocks of inputs.
TGI_EXPORT void tgi_pack_gguf(const tgi::Matrix* matrix, int32_t type, const uint8_t* const* rows, int threads) {
  using namespace tgi;
  switch (type) {
    case 2: return pack_type<gguf::Q4_0>(*matrix, rows, threads);
    case 3: return pack_type<gguf::Q4_1>(*matrix, rows, threads);
    case 6: return pack_type<gguf::Q5_0>(*matrix, rows, threads);
    case 7: return pack_type<gguf::Q5_1>(*matrix, rows, threads);
    case 8: return pack_type<gguf::Q8_0>(*matrix, rows, threads);
    case 10: return pack_type<gguf::Q2_K>(*matrix, rows, threads);
    case 11: return pack_type<gguf::Q3_K>(*matrix, rows, threads);
    case 12: return pack_type<gguf::Q4_K>(*matrix, rows, threads);
    case 13: return pack_type<gguf::Q5_K>(*matrix, rows, threads);
    case 14: return pack_type<gguf::Q6_K>(*matrix, rows, threads);
    case 20: return pack_type<gguf::Q4_0>(*matrix, rows, threads);  // IQ4_NL: a table's indices
    case 23: return pack_type<gguf::IQ4_XS>(*matrix, rows, threads);
    case 34: return pack_type<gguf::TQ1_0>(*matrix, rows, threads);
    case 35: return pack_type<gguf::TQ2_0>(*matrix, rows, threads);
    case 39: return pack_type<gguf::MXFP4>(*matrix, rows, threads);
  }
}
