// Rows of x as integers, for products with codes by dot products of bytes.
//
// Each block of inputs has a scale. With two bytes a number (two planes), the scale is a power of two,
// and numbers are below 2^14 of it: those of at least a 64th of the block's largest are exact, others
// are off by at most 2^-14 of the largest, which rounding to bfloat16 may have put off by 2^-9. With
// one byte, numbers are off by at most 1/254 of the largest.
#pragma once

#include "matrix.h"

namespace tgi {

// A row has scales [blocks], then what sums lack int32 [blocks], then, if the weight has offsets, the sums
// of x, negated, float32 [blocks], then, from the next multiple of 64 bytes on, numbers
// [blocks][planes][block], upper bytes first. Codes are unsigned: what the sum of a block's products lacks
// is the sum of its numbers times the code of 0, negated.
struct QuantizedRows {
  uint8_t* first;
  int64_t stride;
};

inline int64_t quantized_blocks(const Matrix& weight) {
  return (weight.in + weight.block() - 1) / weight.block();
}

// Where a row's numbers begin.
inline int64_t quantized_numbers(const Matrix& weight) {
  return (quantized_blocks(weight) * (weight.has_offsets() ? 12 : 8) + 63) / 64 * 64;
}

// Bytes between rows: an odd multiple of 64, so that rows do not share the same sets of the cache.
// 0: the product takes x as it is.
inline int64_t quantized_stride(const Matrix& weight) {
  if (!weight.planes()) return 0;
  const int64_t numbers = quantized_blocks(weight) * weight.planes() * weight.block();
  return ((quantized_numbers(weight) + numbers + 63) / 64 | 1) * 64;
}

// The number of tickets to quantize all rows, 0 if x is taken as it is.
int64_t quantize_tickets(const Linear& linear);

// Quantize the rows of one ticket.
void quantize_run(const Linear& linear, const QuantizedRows& rows, int64_t ticket);

}  // namespace tgi
