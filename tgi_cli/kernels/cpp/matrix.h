// Packed weights and products with them: y = x W^T.
#pragma once

#include "pool.h"

namespace tgi {

enum Format : int32_t { BF16 = 0, INT8 = 1, INT4 = 2 };

// A weight [out, in] in panels of 32 outputs. Filled by Python (kernels/linear.py); see packing.h.
struct Matrix {
  int32_t format;
  int32_t paired;  // panels hold 16 gate and 16 up outputs: gate i beside up i
  int64_t out;
  int64_t in;
  int64_t group;         // inputs that share a scale; 0: one scale per output, or none (BF16)
  const void* data;      // the panels
  const float* scales;   // per panel and group, 32 each; null for BF16
  const float* zeros;    // like scales: the code that stands for 0; null: symmetric
};

enum Epilogue : int32_t {
  STORE = 0,     // y = bf16
  ADD = 1,       // y = bf16(y + bf16(product)): into the residual
  GATED = 2,     // paired weights: y = bf16(act(gate) * up), out / 2 wide
  ACTIVATE = 3,  // y = bf16(act(bf16(product)))
  FLOAT = 4,     // y = float32 of the product rounded to bfloat16
};

// By number, as in kernels/linear.py.
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, QUICK_GELU = 5, TANH = 6 };

struct Linear {
  const bf16* x;
  int64_t x_stride;  // in elements
  int64_t rows;
  const Matrix* weight;
  const bf16* bias;  // [out] in the order of the unpaired outputs, or null
  void* y;
  int64_t y_stride;
  int32_t epilogue;
  int32_t activation;
  float scale;  // ADD: of what is added (1: none)
};

}  // namespace tgi
