// A decoder's layers as a list of operations, run in one go.
#pragma once

#include "attention.h"
#include "convolution.h"
#include "experts.h"
#include "gate.h"
#include "matrix.h"
#include "recurrence.h"
#include "streams.h"

namespace tgi {

enum Kind : int32_t {
  NORM = 0,
  LINEAR = 1,
  ROTATE = 2,
  ATTEND = 3,
  CONVOLVE = 4,
  RECUR = 5,
  GATE = 6,
  HEADS = 7,
  LATENT = 8,
  MULTIPLY = 9,
  SPARSE = 10,
  MIX = 11,
  EXPERTS = 12,
};

// A part of the rows of a buffer; a negative one is none.
struct View {
  int32_t buffer, offset;
};

// Buffers hold a row of bfloat16 numbers per token. Three belong to the caller: 0 is the residual,
// which comes with the embeddings and is overwritten, 1 takes the result, 2 has the layers' own
// embeddings of the token, of models that have some.
constexpr size_t CALLERS = 3;

struct Op {
  int32_t kind;
  View input, output;
  View others[4];
  // NORM: residual += scale * input, unless there is no residual; output = norm of that.
  View residual;
  int32_t norm;  // NormKind; NO_NORM: there is only the sum
  int64_t width;
  const float* weight;
  const float* bias;
  float eps;
  float scale;
  // LINEAR
  const Matrix* matrix;
  const bf16* linear_bias;
  int32_t epilogue, activation;
  // ROTATE: queries, with the keys behind them, are normed (weight [heads + kv_heads, head_dim], if
  // there is one) and rotated (rope >= 0; without rotated dimensions, queries are multiplied by a
  // factor), values normed (value_weight [kv_heads, value_dim], if there is one). The first other is
  // the values: keys and values go into the cache, unless there is none. ATTEND: queries over the
  // cache.
  int32_t layer, rope, rotated;
  int32_t heads, kv_heads, head_dim, value_dim;
  int32_t values_from_keys;  // what keys were before their norm is copied to the values
  const float* value_weight;
  int64_t window, chunk;  // 0: none
  int64_t spans;          // see Spans
  float attention_scale, softcap;
  const float* sinks;
  const float* attention_bias;  // see Attention
  int64_t distances;
  // What has a state, of the layer's index among those, and gates: without what a run gives them.
  // CONVOLVE: input is x, others are before and after. RECUR: input is value, others are query, key,
  // decay and beta. GATE: input is x, the other is the gate.
  const Convolution* convolution;
  const Recurrence* recurrence;
  const Gate* gate;
  // HEADS: each head's numbers, so far apart in the input and the output, times a matrix of its own
  // (`matrix` has that of each). LATENT: the last dimensions of each query head in the input (so far
  // apart), and of the row in the other, are rotated; those go behind a head's `value_dim` numbers in
  // the output, the row into the cache.
  int64_t head_input, head_output;
  // MULTIPLY: output = input times the other, or without one times the weight [width]. SPARSE:
  // output [width] = activation(gate) * up of the input [2 * width], where of gates their mean and
  // `scale` standard deviations are taken off. MIX: input is x, others are base and factors.
  const Mix* mix;
  // EXPERTS: from the input to the output; its routing makes the logits.
  const Experts* mixture;
};

struct Run {
  int64_t first, last;  // operations; those before `first` have run in the same step
  int64_t tokens;
  bf16* callers[CALLERS];  // buffers, [tokens, width] each
  const Step* step;
  const Cache* caches;                // per layer
  // Per rope: [tokens, rotated], or factors of queries [tokens].
  const bf16* const* cosines;
  const bf16* const* sines;
  const float* const* temperatures;
  const StateStep* slots;  // of models that have states, or null
  void* const* states;     // per layer that has them: of its convolution, of its recurrence
  double* seconds;  // per operation, added to; or null
  int32_t threads;
};

}  // namespace tgi
