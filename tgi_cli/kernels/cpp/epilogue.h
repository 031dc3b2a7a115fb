// The end of a product: scales, bias, activation and the result's type.
#pragma once

#include <algorithm>

#include "activation.h"

namespace tgi {

// Inlined: with AVX2, vectors of sixteen are passed in memory.
TGI_INLINE f32x16 load_some(const bf16* from, int64_t count) {
  if (__builtin_expect(count == 16, 1)) return load(from);
  bf16 some[16] = {};
  std::copy_n(from, count, some);
  return load(some);
}

template <class Number>
TGI_INLINE void store_some(Number* to, f32x16 x, int64_t count) {
  if (__builtin_expect(count == 16, 1)) return store(to, x);
  Number all[16];
  store(all, x);
  std::copy_n(all, count, to);
}

// Fetch into the cache what finish() writes.
inline void fetch_results(const Linear& linear, int64_t panel, int64_t row, int64_t rows) {
  const int64_t size = linear.epilogue == FLOAT ? 4 : 2, halves = linear.epilogue == GATED ? 1 : 2;
  for (int64_t end = row + rows; row < end; ++row)
    for (int half = 0; half < halves; ++half)
      __builtin_prefetch(static_cast<uint8_t*>(linear.y) +
                         (row * linear.y_stride + linear.weight->first_output(panel, half)) * size, 1, 3);
}

// Write the results of a panel's sums [rows][32] to rows of y, from `row` on.
inline void finish(const Linear& linear, int64_t panel, int64_t row, int64_t rows, const float* sums) {
  const Matrix& weight = *linear.weight;
  // Copies: the compiler would read the originals again after each row that is written.
  const bool scaled = weight.scales && !weight.group, biased = linear.bias;
  const int64_t stride = linear.y_stride, end = row + rows;
  const int32_t epilogue = linear.epilogue, activation = linear.activation;
  const float added_scale = linear.scale;
  int64_t first[2], count[2];
  f32x16 bias[2], scale[2];
  for (int half = 0; half < 2; ++half) {
    first[half] = weight.first_output(panel, half);
    count[half] = weight.outputs(panel, half);
    if (biased) bias[half] = load_some(linear.bias + first[half], count[half]);
    if (scaled) scale[half] = load(weight.scales + panel * PANEL + 16 * half);
  }
  auto product = [&](int half) __attribute__((always_inline)) {
    f32x16 x = load(sums + 16 * half);
    if (scaled) x *= scale[half];
    if (biased) x += bias[half];
    return x;
  };
  bf16* y = static_cast<bf16*>(linear.y) + row * stride;
  if (epilogue == GATED) {
    auto gate_rows = [&](auto act) __attribute__((always_inline)) {
      for (; row < end; ++row, sums += PANEL, y += stride) {
        const f32x16 gate = through_bf16(act(through_bf16(product(0))));
        store_some(y + first[0], gate * through_bf16(product(1)), count[0]);
      }
    };
    if (activation == SILU) return gate_rows([](f32x16 x) __attribute__((always_inline)) { return silu(x); });
    return gate_rows([&](f32x16 x) { return activate(x, activation); });
  }
  auto write_rows = [&](auto write) __attribute__((always_inline)) {
    for (; row < end; ++row, sums += PANEL, y += stride) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) write(half, product(half));
    }
  };
  switch (epilogue) {
    case ADD:
      return write_rows([&](int half, f32x16 x) __attribute__((always_inline)) {
        x = through_bf16(x);
        if (added_scale != 1.0f) x = through_bf16(x * added_scale);
        store_some(y + first[half], load_some(y + first[half], count[half]) + x, count[half]);
      });
    case ACTIVATE:
      return write_rows([&](int half, f32x16 x) {
        store_some(y + first[half], activate(through_bf16(x), activation), count[half]);
      });
    case FLOAT:
      return write_rows([&](int half, f32x16 x) __attribute__((always_inline)) {
        store_some(static_cast<float*>(linear.y) + row * stride + first[half], through_bf16(x), count[half]);
      });
    default:
      return write_rows([&](int half, f32x16 x) __attribute__((always_inline)) {
        store_some(y + first[half], x, count[half]);
      });
  }
}

}  // namespace tgi
