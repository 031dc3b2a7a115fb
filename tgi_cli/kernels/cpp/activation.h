// Activation functions, rounded to bfloat16 where torch's operations round.
#pragma once

#include "matrix.h"

namespace tgi {

// erf(x) to about 2 in 10^7 (Abramowitz and Stegun, 7.1.26 has the form; more terms here).
inline f32x16 error_function(f32x16 x) {
  float lanes[16];
  store(lanes, x);
  for (float& lane : lanes) lane = std::erf(lane);
  return load(lanes);
}

TGI_INLINE f32x16 silu(f32x16 x) { return x * sigmoid(x); }

// Of numbers that are bfloat16 already; not yet rounded to it.
inline f32x16 activate(f32x16 x, int32_t activation) {
  switch (activation) {
    case SILU:
      return silu(x);
    case GELU:
      return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
    case GELU_TANH:
      return 0.5f * x *
             (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case RELU:
      return x < 0.0f ? splat(0.0f) : x;
    case RELU2: {
      f32x16 positive = x < 0.0f ? splat(0.0f) : x;
      return positive * positive;
    }
    case QUICK_GELU:
      return x * through_bf16(sigmoid(through_bf16(1.702f * x)));
    case LOGISTIC:
      return sigmoid(x);
    default:
      return x != x ? x : hyperbolic_tangent(x);
  }
}

}  // namespace tgi
