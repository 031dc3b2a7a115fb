#include "program_rows.h"

#include <algorithm>
#include <cstring>

#include "elementwise.h"
#include "paged.h"

namespace tgi {
namespace {

void rotate(const Op& op, const Run& run, int64_t token, bf16* head) {
  rotate_head(head, run.cosines[op.rope] + token * op.rotated, run.sines[op.rope] + token * op.rotated, op.rotated);
}

void norm_row(const Buffers& buffers, const Op& op, const Run& run, int64_t token) {
  const bf16* x = buffers.rows(op.input, run).of(token);
  if (op.residual.buffer >= 0) {
    bf16* sum = buffers.rows(op.residual, run).of(token);
    add_row(sum, x, op.scale, op.width);
    x = sum;
  }
  if (op.norm == NO_NORM) return;
  bf16* y = buffers.rows(op.output, run).of(token);
  if (op.norm == RMS_NORM) rms_norm_row(x, y, op.weight, op.eps, op.width);
  if (op.norm == LAYER_NORM) layer_norm_row(x, y, op.weight, op.bias, op.eps, op.width);
}

void fetch(const bf16* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 32) __builtin_prefetch(row + i, 1, 3);
}

// Norm and rotate `count` heads, whose weights begin at `weight`.
void norm_and_rotate(const Op& op, const Run& run, int64_t token, bf16* heads, int64_t count, const float* weight) {
  constexpr int64_t AT_ONCE = 16;
  const int64_t dims = op.head_dim;
  for (int64_t first = 0; first < count; first += AT_ONCE) {
    const int64_t last = std::min(first + AT_ONCE, count);
    float scales[AT_ONCE];
    // Each is a chain of dependent instructions: those of several heads run side by side.
    if (weight)
      for (int64_t head = first; head < last; ++head)
        scales[head - first] = rms_scale(heads + head * dims, op.eps, dims);
    for (int64_t head = first; head < last; ++head) {
      bf16* one = heads + head * dims;
      if (weight) scale_norm_row(one, one, weight + head * dims, scales[head - first], dims);
      if (op.rotated) rotate(op, run, token, one);
    }
  }
}

void rotate_rows(const Buffers& buffers, const Op& op, const Run& run, int64_t first, int64_t last) {
  const int64_t queries = op.heads * op.head_dim;
  const Rows heads = buffers.rows(op.input, run), values = buffers.rows(op.others[0], run);
  for (int64_t token = first; token < last; ++token) {
    bf16* row = heads.of(token);
    // Rows are pages apart, which the processor does not cross by itself.
    if (token + 1 < last) fetch(heads.of(token + 1), (op.heads + op.kv_heads) * op.head_dim);
    if (token + 1 < last && values.first) fetch(values.of(token + 1), op.kv_heads * op.value_dim);
    if (op.values_from_keys)
      std::memcpy(values.of(token), row + queries, size_t(op.kv_heads * op.value_dim) * sizeof(bf16));
    if (op.value_weight)
      for (int64_t head = 0; head < op.kv_heads; ++head) {
        bf16* value = values.of(token) + head * op.value_dim;
        rms_norm_row(value, value, op.value_weight + head * op.value_dim, op.eps, op.value_dim);
      }
    norm_and_rotate(op, run, token, row, op.heads + op.kv_heads, op.weight);
    if (op.rope >= 0 && !op.rotated) scale_row(row, run.temperatures[op.rope][token], queries);
  }
  if (!values.first) return;
  store_kv(run.caches[op.layer], run.step->slots + first, last - first, {heads.of(first) + queries, heads.stride},
           {values.of(first), values.stride});
}

void latent_row(const Buffers& buffers, const Op& op, const Run& run, int64_t token) {
  const int64_t rope_dim = op.head_dim - op.value_dim;
  const bf16* from = buffers.rows(op.input, run).of(token) + op.head_input - rope_dim;
  bf16* to = buffers.rows(op.output, run).of(token) + op.value_dim;
  for (int64_t head = 0; head < op.heads; ++head, from += op.head_input, to += op.head_dim) {
    std::memcpy(to, from, size_t(rope_dim) * sizeof(bf16));
    if (op.rotated) rotate(op, run, token, to);
  }
  bf16* row = buffers.rows(op.others[0], run).of(token);
  if (op.rotated) rotate(op, run, token, row + op.value_dim);
  store_kv(run.caches[op.layer], run.step->slots + token, 1, {row, 0}, {nullptr, 0});
}

void product_row(const Buffers& buffers, const Op& op, const Run& run, int64_t token) {
  const bf16* x = buffers.rows(op.input, run).of(token);
  bf16* y = buffers.rows(op.output, run).of(token);
  if (op.weight) return multiply_row(x, op.weight, y, op.width);
  multiply_row(x, buffers.rows(op.others[0], run).of(token), y, op.width);
}

}  // namespace

void run_rows(const Buffers& buffers, const Op& op, const Run& run, int64_t first, int64_t last) {
  const Rows x = buffers.rows(op.input, run), y = buffers.rows(op.output, run);
  switch (op.kind) {
    case NORM:
      for (int64_t token = first; token < last; ++token) norm_row(buffers, op, run, token);
      return;
    case ROTATE:
      return rotate_rows(buffers, op, run, first, last);
    case LATENT:
      for (int64_t token = first; token < last; ++token) latent_row(buffers, op, run, token);
      return;
    case MULTIPLY:
      for (int64_t token = first; token < last; ++token) product_row(buffers, op, run, token);
      return;
    case SPARSE:
      for (int64_t token = first; token < last; ++token)
        sparse_gated_row(x.of(token), y.of(token), op.width, op.activation, op.scale);
      return;
    case MIX: {
      const Rows base = buffers.rows(op.others[0], run), factors = buffers.rows(op.others[1], run);
      for (int64_t token = first; token < last; ++token)
        mix_row(*op.mix, x.of(token), base.of(token), factors.of(token), y.of(token));
      return;
    }
    case GATE: {
      Gate gate = *op.gate;
      x.put(gate.x, gate.x_stride);
      y.put(gate.output, gate.output_stride);
      buffers.rows(op.others[0], run).put(gate.gate, gate.gate_stride);
      for (int64_t token = first; token < last; ++token) gate_row(gate, token);
      return;
    }
  }
}

}  // namespace tgi
