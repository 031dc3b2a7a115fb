// The selective scan of Mamba in its recurrent form (https://arxiv.org/abs/2312.00752).
#pragma once

#include "states.h"

namespace tgi {

// Per channel a state S [size] in float32, and per token S = exp(step a) S + step x b; y = S c.
//
// Tokens are taken one after the other, and a channel's numbers are added up in one order: where a
// sequence is cut, what shares its step, and how channels are divided among threads, change no bit.
struct Scan {
  const float* x;      // [tokens, channels]
  const float* steps;  // likewise
  const float* a;      // [channels, size]
  const float* b;      // [tokens, size]
  const float* c;      // likewise
  float* output;       // [tokens, channels]
  float* states;       // [slots, channels, size]
  int64_t channels, size;
};

int64_t scan_tickets(const Scan& scan, const StateStep& step);
void scan_run(const Scan& scan, const StateStep& step, int64_t ticket);

}  // namespace tgi
