#include "gate.h"

#include <vector>

#include "activation.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

template <class T>
void gate_group(const Gate& g, const T* x, const T* gate, T* y, const float* weight) {
  static thread_local std::vector<float> room;
  if (room.size() < size_t(g.width) + 16) room.resize(size_t(g.width) + 16);
  float* const products = room.data();
  const bool first = g.gate_first || !weight;
  const f32x16 whole = g.per_group ? activate(splat(to_float(*gate)), g.activation) : f32x16{};
  auto factor = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    return g.per_group ? whole : activate(load_part(gate + i, left), g.activation);
  };
  f32x16 squares = {};
  in_vectors(0, g.width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    f32x16 value = load_part(x + i, left);
    if (first) value = value * factor(i, left);
    squares = fused(value, value, squares);
    store(products + i, value);
  });
  const float scale = weight ? 1.0f / std::sqrt(sum_of(squares) / float(g.width) + g.eps) : 1.0f;
  in_vectors(0, g.width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    f32x16 value = load(products + i);
    if (weight) value = value * scale * load_part(weight + i, left);
    if (!first) value = value * factor(i, left);
    store_part(y + i, value, left);
  });
}

template <class T>
void gate_groups(const Gate& g, int64_t token) {
  const T* x = static_cast<const T*>(g.x) + token * g.x_stride;
  const T* gate = static_cast<const T*>(g.gate) + token * g.gate_stride;
  T* y = static_cast<T*>(g.output) + token * g.output_stride;
  for (int64_t group = 0; group < g.groups; ++group) {
    const int64_t at = group * g.width;
    const float* weight = g.weight ? g.weight + group * g.weight_stride : nullptr;
    gate_group(g, x + at, gate + (g.per_group ? group : at), y + at, weight);
  }
}

}  // namespace

void gate_row(const Gate& gate, int64_t token) {
  if (gate.wide)
    gate_groups<float>(gate, token);
  else
    gate_groups<bf16>(gate, token);
}

}  // namespace tgi

TGI_EXPORT void tgi_gate(const tgi::Gate* gate, int64_t tokens, int threads) {
  constexpr int64_t SMALL = 8 * 1024;  // numbers that one thread does before another has woken up
  const int64_t width = std::max<int64_t>(gate->groups * gate->width, 1), rows = (SMALL + width - 1) / width;
  tgi::share_out(threads, (tokens + rows - 1) / rows, [&](int64_t ticket, int) {
    const int64_t end = std::min(tokens, (ticket + 1) * rows);
    for (int64_t token = ticket * rows; token < end; ++token) tgi::gate_row(*gate, token);
  });
}
