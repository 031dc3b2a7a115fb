// Several streams of hidden states per token, and what becomes of them beside a layer (AltUp,
// https://arxiv.org/abs/2301.13310).
#pragma once

#include "simd.h"

namespace tgi {

// y[s] = base[s] + x[0] f[s][0] + x[1] f[s][1] + ..., rounded after each product and each sum, for
// the factors f + plus.
struct Mix {
  int64_t streams, sources;
  int64_t width;  // of a stream; those of a token are side by side
  float plus;
};

// `x` has the sources, `factors` [streams][sources]; y may be base, but not x.
inline void mix_row(const Mix& mix, const bf16* x, const bf16* base, const bf16* factors, bf16* y) {
  for (int64_t s = 0; s < mix.streams; ++s, base += mix.width, y += mix.width, factors += mix.sources) {
    int64_t i = 0;
    for (; i + 16 <= mix.width; i += 16) {
      f32x16 sum = load(base + i);
      for (int64_t from = 0; from < mix.sources; ++from) {
        const float factor = to_float(to_bf16(to_float(factors[from]) + mix.plus));
        sum = through_bf16(sum + through_bf16(load(x + from * mix.width + i) * factor));
      }
      store(y + i, sum);
    }
    for (; i < mix.width; ++i) {
      float sum = to_float(base[i]);
      for (int64_t from = 0; from < mix.sources; ++from) {
        const float factor = to_float(to_bf16(to_float(factors[from]) + mix.plus));
        sum = to_float(to_bf16(sum + to_float(to_bf16(to_float(x[from * mix.width + i]) * factor))));
      }
      y[i] = to_bf16(sum);
    }
  }
}

}  // namespace tgi
