// The end of a product: scales, bias, activation and the result's type.
#pragma once

#include <algorithm>

#include "activation.h"

namespace tgi {

inline f32x16 load_some(const bf16* from, int64_t count) {
  if (count == 16) return load(from);
  bf16 some[16] = {};
  std::copy_n(from, count, some);
  return load(some);
}

template <class Number>
void store_some(Number* to, f32x16 x, int64_t count) {
  if (count == 16) return store(to, x);
  Number all[16];
  store(all, x);
  std::copy_n(all, count, to);
}

// Write the results of a panel's sums [rows][32] to rows of y, from `row` on.
inline void finish(const Linear& linear, int64_t panel, int64_t row, int64_t rows, const float* sums) {
  const Matrix& weight = *linear.weight;
  int64_t first[2], count[2];
  f32x16 bias[2], scale[2];
  for (int half = 0; half < 2; ++half) {
    first[half] = weight.first_output(panel, half);
    count[half] = weight.outputs(panel, half);
    if (linear.bias) bias[half] = load_some(linear.bias + first[half], count[half]);
    if (weight.scales && !weight.group) scale[half] = load(weight.scales + panel * PANEL + 16 * half);
  }
  auto product = [&](int half) {
    f32x16 x = load(sums + 16 * half);
    if (weight.scales && !weight.group) x *= scale[half];
    if (linear.bias) x += bias[half];
    return x;
  };
  for (int64_t end = row + rows; row < end; ++row, sums += PANEL) {
    bf16* y = static_cast<bf16*>(linear.y) + row * linear.y_stride;
    if (linear.epilogue == GATED) {
      f32x16 gate = through_bf16(activate(through_bf16(product(0)), linear.activation));
      store_some(y + first[0], gate * through_bf16(product(1)), count[0]);
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      bf16* to = y + first[half];
      f32x16 x = product(half);
      switch (linear.epilogue) {
        case ADD:
          x = through_bf16(x);
          if (linear.scale != 1.0f) x = through_bf16(x * linear.scale);
          store_some(to, load_some(to, count[half]) + x, count[half]);
          break;
        case ACTIVATE:
          store_some(to, activate(through_bf16(x), linear.activation), count[half]);
          break;
        case FLOAT:
          store_some(static_cast<float*>(linear.y) + row * linear.y_stride + first[half],
                     through_bf16(x), count[half]);
          break;
        default:
          store_some(to, x, count[half]);
      }
    }
  }
}

}  // namespace tgi
