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

#if defined(__AVX512VNNI__)

// The largest of 32 unsigned words.
uint32_t largest_of(__m512i words) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return ~uint32_t(_mm_cvtsi128_si32(least)) & 0xffff;
}

float power(uint32_t biased_exponent) {
  const uint32_t bits = biased_exponent << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Quantize `count` numbers and zeros up to a whole block; returns the sum of the integers.
int32_t quantize_block(const Form& form, const bf16* x, int64_t count, uint8_t* to, float& scale) {
  const int64_t block = form.block, planes = form.planes;
  auto some = [&](int64_t from) { return _bzhi_u32(~0u, uint32_t(std::clamp<int64_t>(count - from, 0, 32))); };
  __m512i magnitudes = _mm512_setzero_si512();
  for (int64_t i = 0; i < block; i += 32) {
    const __m512i words = _mm512_maskz_loadu_epi16(some(i), x + i);
    magnitudes = _mm512_max_epu16(magnitudes, _mm512_and_si512(words, _mm512_set1_epi16(0x7fff)));
  }
  const uint32_t largest = largest_of(magnitudes), exponent = largest >> 7;
  const bool tiny = exponent < 14, finite = exponent < 255;
  if (tiny || !finite) {  // a block below 2^-113 becomes 0, one with an infinity or NaN becomes NaN
    std::memset(to, 0, size_t(block * planes));
    scale = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    return 0;
  }
  float factor;
  if (planes == 2) {
    factor = power(267 - exponent);
    scale = power(exponent - 13);
  } else {
    factor = 127.0f / to_float(bf16(largest));
    scale = to_float(bf16(largest)) / 127.0f;
  }
  // The order of codes in the bytes of their lower bits.
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  auto put = [&](__m512i numbers, uint8_t* at) {
    const __m128i bytes = _mm512_cvtepi32_epi8(numbers);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), form.nibbles ? _mm_shuffle_epi8(bytes, order) : bytes);
  };
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < block; i += 16) {
    const __m256i words = _mm256_maskz_loadu_epi16(__mmask16(some(i)), x + i);
    const __m512 number = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(number, _mm512_set1_ps(factor)));
    sums = _mm512_add_epi32(sums, whole);
    if (planes == 1) {
      put(whole, to + i);
      continue;
    }
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    put(upper, to + i);
    put(_mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8)), to + block + i);
  }
  return _mm512_reduce_add_epi32(sums);
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
