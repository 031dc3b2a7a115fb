#include "quantized_rows.h"

#include <algorithm>
#include <limits>

namespace tgi {
namespace {

// About how many numbers a ticket has: a quarter of a microsecond.
constexpr int64_t TICKET = 2048;

// How rows are quantized.
struct Form {
  int64_t block, planes;
  bool nibbles;  // order of codes whose lower four bits are packed
};

#if TGI_BYTE_PRODUCTS

// The largest of 8 unsigned words.
uint32_t largest_of(__m128i words) {
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(words, _mm_set1_epi16(-1)));
  return ~uint32_t(_mm_cvtsi128_si32(least)) & 0xffff;
}

uint32_t largest_of(__m256i words) {
  return largest_of(_mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

float power(uint32_t biased_exponent) {
  const uint32_t bits = biased_exponent << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 16 bytes, in the order of codes in the bytes of their lower bits if the form asks for it.
void put(const Form& form, __m128i bytes, uint8_t* at) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), form.nibbles ? _mm_shuffle_epi8(bytes, order) : bytes);
}

#if defined(__AVX512F__)

// The bits of the largest magnitude.
uint32_t largest_magnitude(const bf16* x, int64_t count) {
  __m512i magnitudes = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 32) {
    const uint32_t some = _bzhi_u32(~0u, uint32_t(std::min<int64_t>(count - i, 32)));
    const __m512i words = _mm512_maskz_loadu_epi16(some, x + i);
    magnitudes = _mm512_max_epu16(magnitudes, _mm512_and_si512(words, _mm512_set1_epi16(0x7fff)));
  }
  return largest_of(_mm256_max_epu16(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1)));
}

// Numbers times `factor` as integers, and zeros up to a whole block; returns their sum.
int32_t put_integers(const Form& form, const bf16* x, int64_t count, float factor, uint8_t* to) {
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < form.block; i += 16) {
    const auto some = __mmask16(_bzhi_u32(~0u, uint32_t(std::clamp<int64_t>(count - i, 0, 16))));
    const __m256i words = _mm256_maskz_loadu_epi16(some, x + i);
    const __m512 number = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(number, _mm512_set1_ps(factor)));
    sums = _mm512_add_epi32(sums, whole);
    if (form.planes == 1) {
      put(form, _mm512_cvtepi32_epi8(whole), to + i);
      continue;
    }
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    put(form, _mm512_cvtepi32_epi8(upper), to + i);
    put(form, _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8))), to + form.block + i);
  }
  return _mm512_reduce_add_epi32(sums);
}

#else

uint32_t largest_magnitude(const bf16* x, int64_t count) {
  __m256i magnitudes = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    magnitudes = _mm256_max_epu16(magnitudes, _mm256_and_si256(words, _mm256_set1_epi16(0x7fff)));
  }
  uint32_t largest = largest_of(magnitudes);
  for (; i < count; ++i) largest = std::max(largest, uint32_t(x[i] & 0x7fff));
  return largest;
}

int32_t put_integers(const Form& form, const bf16* x, int64_t count, float factor, uint8_t* to) {
  const __m256 factors = _mm256_set1_ps(factor);
  auto eight = [&](const bf16* from) __attribute__((always_inline)) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), factors));
  };
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < form.block; i += 16) {
    bf16 padded[16];
    const bf16* from = x + i;
    if (count - i < 16) {
      std::memset(padded, 0, sizeof padded);
      if (count > i) std::memcpy(padded, from, size_t(count - i) * sizeof(bf16));
      from = padded;
    }
    const __m256i first = eight(from), second = eight(from + 8);
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(first, second));
    // Instructions narrow each half of a register by itself.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0x08);
    put(form, _mm256_castsi256_si128(bytes), to + i);
  }
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const __m128i quarter = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(quarter) + _mm_extract_epi32(quarter, 1);
}

#endif

// Quantize `count` numbers and zeros up to a whole block; returns the sum of the integers.
int32_t quantize_block(const Form& form, const bf16* x, int64_t count, uint8_t* to, float& scale) {
  const uint32_t largest = largest_magnitude(x, count), exponent = largest >> 7;
  const bool tiny = exponent < 14, finite = exponent < 255;
  if (tiny || !finite) {  // a block below 2^-113 becomes 0, one with an infinity or NaN becomes NaN
    std::memset(to, 0, size_t(form.block * form.planes));
    scale = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    return 0;
  }
  float factor;
  if (form.planes == 2) {
    factor = power(267 - exponent);
    scale = power(exponent - 13);
  } else {
    factor = 127.0f / to_float(bf16(largest));
    scale = to_float(bf16(largest)) / 127.0f;
  }
  return put_integers(form, x, count, factor, to);
}

#else

int32_t quantize_block(const Form&, const bf16*, int64_t, uint8_t*, float&) { return 0; }

#endif

}  // namespace

int64_t quantize_tickets(const Linear& linear) {
  if (!linear.weight->planes() || !linear.rows) return 0;
  return std::clamp<int64_t>(linear.rows * linear.weight->in / TICKET, 1, linear.rows);
}

void quantize_run(const Linear& linear, const QuantizedRows& rows, int64_t ticket) {
  const Matrix& weight = *linear.weight;
  const Form form = {weight.block(), weight.planes(), weight.format != INT8};
  const int64_t tickets = quantize_tickets(linear), block = form.block, blocks = quantized_blocks(weight);
  const int64_t at = quantized_numbers(weight), middle = weight.middle();
  const int64_t end = linear.rows * (ticket + 1) / tickets;
  for (int64_t row = linear.rows * ticket / tickets; row < end; ++row) {
    const bf16* x = linear.x + row * linear.x_stride;
    uint8_t* const to = rows.first + row * rows.stride;
    uint8_t* numbers = to + at;
    for (int64_t b = 0; b < blocks; ++b, numbers += form.planes * block) {
      float scale = 0;
      const int64_t count = std::min(block, weight.in - b * block);
      const int64_t sum = quantize_block(form, x + b * block, count, numbers, scale);
      const int32_t lacking = int32_t(-middle * sum);
      std::memcpy(to + 4 * b, &scale, 4);
      std::memcpy(to + 4 * (blocks + b), &lacking, 4);
      if (!weight.has_offsets()) continue;
      const float negated = -scale * float(sum);
      std::memcpy(to + 4 * (2 * blocks + b), &negated, 4);
    }
  }
}

}  // namespace tgi
