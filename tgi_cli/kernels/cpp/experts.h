// A mixture of experts: a router chooses a few of many feed-forward blocks for each token.
#pragma once

#include "matrix.h"

namespace tgi {

// By number, as in kernels/experts.py.
enum Scores : int32_t { SOFTMAX_TOPK = 0, TOPK_SOFTMAX = 1, SIGMOID_TOPK = 2 };

// How experts are chosen; tgi_cli/layers/routing.py has the words.
struct Routing {
  const Matrix* matrix;     // of bfloat16 [experts, in], or null
  const bf16* bias;         // beside it, or null
  const float* weight;      // float32 [experts, in], or null; without either, there are logits
  const float* correction;  // [experts], or null
  int32_t scores, normalize;
  int64_t groups, top_groups, best_of_group;
  float scaling;
};

// A feed-forward block.
struct Block {
  const Matrix* up;       // the projection up, or gate and up
  const Matrix* down;     // from the block's own width back
  const bf16* up_bias;    // or null
  const bf16* down_bias;  // or null
};

// y = for each token, the sum of its experts' outputs times their weights, and the shared expert's.
// Filled by Python (kernels/experts.py).
struct Experts {
  const bf16* x;
  int64_t x_stride;
  int64_t tokens;
  int64_t top_k;
  const Routing* routing;  // null: the choice is given
  const float* logits;     // [tokens, experts] where the routing makes none
  const int64_t* chosen;   // [tokens, top_k], no expert twice for a token
  const bf16* factors;     // [tokens, top_k]
  bf16* y;
  int64_t y_stride;
  int64_t experts;
  const Block* blocks;  // per expert, all of the same sizes
  const Block* shared;  // that every token passes, or null
  int32_t epilogue;     // of the products up: GATED, ACTIVATE, or STORE, which is followed by a clamped SwiGLU
  int32_t activation;
  int32_t shared_activation;  // GATED
  int32_t scale_inputs;       // what an expert is given is multiplied, not its output
};

// Logits [tokens, experts] of rows x [in], by a weight in float32.
struct RouterLogits {
  const bf16* x;
  int64_t x_stride;
  int64_t tokens;
  const float* weight;  // [experts, in]
  int64_t experts;
  int64_t in;
  float* logits;
};
void router_logits(const RouterLogits& router, int threads);

// All tokens on `threads` threads.
void experts_run(const Experts& layer, int threads);

// Choose for one token: its logits to `top_k` experts, best first, and their weights.
void choose(const Routing& routing, const float* logits, int64_t experts, int64_t top_k, int64_t* chosen,
            bf16* factors);

}  // namespace tgi
