// Gated norms, and gates without a norm: what follows linear attention and gated attention.
#pragma once

#include "states.h"

namespace tgi {

// y = norm(x) activation(gate), or norm(x activation(gate)) if the gate comes first; norms are RMS
// norms over each group. Computed in float32 and rounded once.
struct Gate {
  const void* x;     // [tokens, groups, width], bfloat16, or float32 if `wide`
  const void* gate;  // likewise, or [tokens, groups] if `per_group`
  void* output;      // likewise; may be x
  int64_t x_stride, gate_stride, output_stride;  // between tokens
  const float* weight;  // [width], or [groups, width]; null: no norm
  int64_t weight_stride;  // between groups: 0 or width
  int64_t groups, width;
  int32_t wide;
  int32_t activation;  // of the gate
  int32_t gate_first;
  int32_t per_group;
  float eps;
};

void gate_row(const Gate& gate, int64_t token);

}  // namespace tgi
