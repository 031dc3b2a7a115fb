// Rows of scores to tokens: the likeliest, or one that is drawn.
#pragma once

#include "pool.h"
#include "simd.h"

namespace tgi {

// Arrays are by row, [rows] where nothing else is said; kernels/sample.py fills this in.
struct Sample {
  const float* logits;  // [rows, vocabulary]: log-probabilities are theirs
  int64_t logits_stride;
  const float* scores;  // the same shape: what is chosen by; may be the logits
  int64_t scores_stride;
  int64_t rows;
  int64_t vocabulary;
  // Of rows that draw; null: all take the likeliest token.
  const double* uniforms;    // in (0, 1), or 0: this row takes the likeliest
  const float* temperature;
  const int64_t* top_k;  // 0: all; null: no row filters so, as with the next two
  const double* top_p;   // 1: all
  const float* min_p;    // 0: all
  // Written.
  int64_t* token_ids;
  float* logprobs;
  float* peaks;     // the highest logit
  float* log_sums;  // log of the sum of e^(logit - peak)
};

}  // namespace tgi
