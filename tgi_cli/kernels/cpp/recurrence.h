// Linear attention in its recurrent form: the gated delta rule and state space models of one decay
// per head (Mamba-2).
//
// Per head a state S [key_dim, value_dim] in float32, and per token
//   S *= decay;  S += k (v - S^T k) beta^T  (delta)  or  S += k (v step)^T;  o = S^T q + skip v.
// (https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692, https://arxiv.org/abs/2405.21060;
// of Mamba-2 q is C, k is B, v is x.)
//
// Tokens are taken one after the other, and a column's sums run over the rows in one order: where a
// sequence is cut, what shares its step, and how columns are divided among threads, change no bit.
#pragma once

#include "states.h"

namespace tgi {

// How a token's decay comes from its number a: of a head, or of each of its rows ("channels").
enum Decay : int32_t {
  SOFTPLUS = 0,  // step = softplus(a + bias) within [floor, ceiling]; decay = exp(-rate step)
  SIGMOID = 1,   // decay = exp(floor sigmoid(rate (a + bias)))
  GIVEN = 2,     // decay = exp(a)
};

struct Recurrence {
  // Between tokens there are so many numbers; bfloat16, or float32 if `wide`.
  const void* query;  // [tokens, key_heads, key_dim]
  const void* key;
  const void* value;  // [tokens, heads, value_dim]
  const void* decay;  // [tokens, heads] or, with channels, [tokens, heads, key_dim]
  const void* beta;   // [tokens, heads], of the delta rule: its sigmoid, but of GIVEN itself
  void* output;       // [tokens, heads, value_dim]
  int64_t query_stride, key_stride, value_stride, decay_stride, beta_stride, output_stride;
  const float* rate;  // [heads], above 0
  const float* bias;  // like decay without tokens
  const float* skip;  // [heads], or null
  float* states;      // [slots, heads, key_dim, value_dim]
  int64_t heads, key_heads, key_dim, value_dim;
  int32_t wide;
  int32_t wide_gates;  // decay and beta are float32
  int32_t delta;
  int32_t channels;
  int32_t form;       // Decay
  float floor, ceiling;
  float beta_factor;
  float norm_eps;  // of the L2 norms of q and k; below 0: none
  float scale;     // of q
};

constexpr int64_t MAX_KEY_DIM = 256;

// The pieces are fewer where heads alone are enough to keep the threads busy.
int64_t recurrence_tickets(const Recurrence& recurrence, const StateStep& step, int threads);
void recurrence_run(const Recurrence& recurrence, const StateStep& step, int threads, int64_t ticket);

}  // namespace tgi
