// Causal depthwise convolution over the tokens of each sequence.
#pragma once

#include "states.h"

namespace tgi {

// y = after * activation(sum over taps of weight * (before * x) + bias), where what is times `before`
// is rounded, and so is what `after` is times. Inputs before a step come from the state.
struct Convolution {
  // bfloat16, or float32 if `wide`; between tokens there are so many numbers.
  const void* x;       // [tokens, channels]
  const void* before;  // likewise, or null
  const void* after;   // likewise, or null
  void* output;        // [tokens, channels]; not x
  int64_t x_stride, before_stride, after_stride, output_stride;
  const float* weight;  // [taps, channels], that of the newest input last
  const float* bias;    // [channels], or null
  void* states;         // [slots, taps - 1, channels], the newest last
  int64_t channels, taps;
  int32_t wide;
  int32_t activation;  // Activation; below 0: none
};

constexpr int64_t MAX_TAPS = 8;

int64_t convolution_tickets(const Convolution& convolution, const StateStep& step);
void convolution_run(const Convolution& convolution, const StateStep& step, int64_t ticket);

}  // namespace tgi
