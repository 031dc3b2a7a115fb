#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "experts.h"
#include "states.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The indices of the `count` largest of `values`, the largest first, of equal ones the first; each is
// left at minus infinity. Without enough numbers (NaN), any that are left follow.
void take_largest(float* values, int64_t size, int64_t count, int64_t* indices) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t best = -1;
    for (int64_t k = 0; k < size; ++k)
      if (values[k] > NEVER && (best < 0 || values[k] > values[best])) best = k;
    for (int64_t k = 0; best < 0 && k < size; ++k)
      if (std::find(indices, indices + i, k) == indices + i) best = k;
    indices[i] = best;
    values[best] = NEVER;
  }
}

void softmax(float* values, int64_t size) {
  const float most = *std::max_element(values, values + size);
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += values[i] = std::exp(values[i] - most);
  for (int64_t i = 0; i < size; ++i) values[i] /= sum;
}

// Experts of other groups than the best count as minus infinity.
void within_groups(const Routing& routing, std::vector<float>& choice) {
  const int64_t size = int64_t(choice.size()) / routing.groups;
  const int64_t some = std::min(routing.best_of_group, size);
  std::vector<float> sums, own;
  std::vector<int64_t> best(static_cast<size_t>(std::max(some, routing.top_groups)));
  for (int64_t group = 0; group < routing.groups; ++group) {
    own.assign(choice.begin() + group * size, choice.begin() + (group + 1) * size);
    take_largest(own.data(), size, some, best.data());
    float sum = 0;
    for (int64_t i = 0; i < some; ++i) sum += choice[size_t(group * size + best[size_t(i)])];
    sums.push_back(sum);
  }
  take_largest(sums.data(), routing.groups, routing.top_groups, best.data());
  for (int64_t group = 0; group < routing.groups; ++group)
    if (std::find(best.begin(), best.begin() + routing.top_groups, group) == best.begin() + routing.top_groups)
      std::fill_n(choice.begin() + group * size, size, NEVER);
}

}  // namespace

void router_logits(const RouterLogits& router, int threads) {
  constexpr int64_t AT_ONCE = 8;  // experts whose weights are read once for all tokens
  share_out(threads, (router.experts + AT_ONCE - 1) / AT_ONCE, [&](int64_t ticket, int) {
    const int64_t end = std::min(router.experts, (ticket + 1) * AT_ONCE);
    for (int64_t token = 0; token < router.tokens; ++token)
      for (int64_t expert = ticket * AT_ONCE; expert < end; ++expert) {
        const bf16* x = router.x + token * router.x_stride;
        const float* weight = router.weight + expert * router.in;
        f32x16 sums{};
        in_vectors(0, router.in, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
          sums = fused(load_part(x + i, left), load_part(weight + i, left), sums);
        });
        router.logits[token * router.experts + expert] = sum_of(sums);
      }
  });
}

void choose(const Routing& routing, const float* logits, int64_t experts, int64_t top_k, int64_t* chosen,
            bf16* factors) {
  static thread_local std::vector<float> scores, choice, best;
  scores.assign(logits, logits + experts);
  if (routing.scores == SOFTMAX_TOPK) softmax(scores.data(), experts);
  if (routing.scores == SIGMOID_TOPK)
    for (float& score : scores) score = float(1.0 / (1.0 + std::exp(-double(score))));
  choice = scores;
  if (routing.correction)
    for (int64_t i = 0; i < experts; ++i) choice[size_t(i)] += routing.correction[i];
  if (routing.top_groups < routing.groups) within_groups(routing, choice);
  take_largest(choice.data(), experts, top_k, chosen);
  best.resize(size_t(top_k));
  float sum = 0;
  for (int64_t i = 0; i < top_k; ++i) sum += best[size_t(i)] = scores[size_t(chosen[i])];
  if (routing.scores == TOPK_SOFTMAX)
    softmax(best.data(), top_k);
  else if (routing.normalize)
    for (float& each : best) each /= sum;
  for (int64_t i = 0; i < top_k; ++i)
    factors[i] = to_bf16(routing.scores == TOPK_SOFTMAX ? best[size_t(i)] : best[size_t(i)] * routing.scaling);
}

}  // namespace tgi

TGI_EXPORT void tgi_router_logits(const tgi::RouterLogits* router, int threads) {
  tgi::router_logits(*router, threads);
}

// For tests: the choice of tokens by their logits [tokens, experts].
TGI_EXPORT void tgi_choose(const tgi::Routing* routing, const float* logits, int64_t tokens, int64_t experts,
                           int64_t top_k, int64_t* chosen, tgi::bf16* factors) {
  for (int64_t token = 0; token < tokens; ++token)
    tgi::choose(*routing, logits + token * experts, experts, top_k, chosen + token * top_k, factors + token * top_k);
}
