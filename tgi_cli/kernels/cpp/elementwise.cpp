// The operations between products, one by one: for models that run module by module.
#include "elementwise.h"

#include "activation.h"
#include "states.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr int64_t SMALL = 16 * 1024;  // numbers that one thread does before another has woken up

template <class Row>
void rows_of(int threads, int64_t rows, int64_t width, const Row& row) {
  int64_t at_once = width >= SMALL ? 1 : (SMALL + width - 1) / (width ? width : 1);
  share_out(threads, (rows + at_once - 1) / at_once, [&](int64_t ticket, int) {
    int64_t last = (ticket + 1) * at_once < rows ? (ticket + 1) * at_once : rows;
    for (int64_t i = ticket * at_once; i < last; ++i) row(i);
  });
}

template <class Weight>
void rms_norm(const bf16* x, int64_t x_stride, bf16* y, bf16* residual, const Weight* weight,
              float eps, int64_t rows, int64_t width, int threads) {
  rows_of(threads, rows, width, [&](int64_t row) {
    const bf16* from = x + row * x_stride;
    if (residual) {
      add_row(residual + row * width, from, 1.0f, width);
      from = residual + row * width;
    }
    rms_norm_row(from, y + row * width, weight, eps, width);
  });
}

template <class Weight>
void norm_heads(bf16* heads, int64_t stride, const Weight* weight, float eps, int64_t tokens,
                int64_t num_heads, int64_t dims, int threads) {
  rows_of(threads, tokens, num_heads * dims, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      bf16* values = heads + token * stride + head * dims;
      rms_norm_row(values, values, weight + head * dims, eps, dims);
    }
  });
}

// y = act(gate - below) for numbers in a row, times up if there is one.
void activate_row(const bf16* gate, const bf16* up, bf16* y, int64_t width, int32_t activation,
                  const float* below = nullptr) {
  in_vectors(0, width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    f32x16 x = load_part(gate + i, left);
    if (below) {
      x = x - *below;
      x = through_bf16(x < 0.0f ? splat(0.0f) : x);
    }
    x = activate(x, activation);
    store_part(y + i, up ? through_bf16(x) * load_part(up + i, left) : x, left);
  });
}

}  // namespace

void sparse_gated_row(const bf16* gate_up, bf16* y, int64_t width, int32_t activation, float deviations) {
  f32x16 sums = {}, squares = {};
  in_vectors(0, width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    sums += load_part(gate_up + i, left);
  });
  const float mean = sum_of(sums) / float(width);
  in_vectors(0, width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    const f32x16 off = load_part(gate_up + i, left) - mean;
    squares = fused(off, off, squares);
  });
  // Behind the last of fewer than 16 numbers there are zeros, whose squares do not count.
  const int64_t none = (16 - width % 16) % 16;
  const float variance = (sum_of(squares) - float(none) * mean * mean) / float(width);
  const float below = mean + deviations * std::sqrt(std::max(variance, 0.0f));
  activate_row(gate_up, gate_up + width, y, width, activation, &below);
}

}  // namespace tgi

using namespace tgi;

// y [rows, width] = norm of x, or of residual += x; the weight is float32 if it is `wide`.
TGI_EXPORT void tgi_rms_norm(const bf16* x, int64_t x_stride, bf16* y, bf16* residual,
                             const void* weight, int wide, float eps, int64_t rows, int64_t width,
                             int threads) {
  if (wide)
    rms_norm(x, x_stride, y, residual, static_cast<const float*>(weight), eps, rows, width, threads);
  else
    rms_norm(x, x_stride, y, residual, static_cast<const bf16*>(weight), eps, rows, width, threads);
}

// Heads [tokens, num_heads, dims], `stride` between tokens, in place: normed if there is a weight
// [num_heads, dims], rotated if there are cosines and sines [tokens, rotated].
TGI_EXPORT void tgi_rotate(bf16* heads, int64_t stride, const void* weight, int wide, float eps,
                           const bf16* cosines, const bf16* sines, int64_t rotated, int64_t tokens,
                           int64_t num_heads, int64_t dims, int threads) {
  if (weight && wide)
    norm_heads(heads, stride, static_cast<const float*>(weight), eps, tokens, num_heads, dims, threads);
  else if (weight)
    norm_heads(heads, stride, static_cast<const bf16*>(weight), eps, tokens, num_heads, dims, threads);
  if (!cosines) return;
  rows_of(threads, tokens, num_heads * dims, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      rotate_head(heads + token * stride + head * dims, cosines + token * rotated,
                  sines + token * rotated, rotated);
  });
}

// y [rows, width] = norm of x, or of residual += x; weight and bias (or null) are float32.
TGI_EXPORT void tgi_layer_norm(const bf16* x, int64_t x_stride, bf16* y, bf16* residual,
                               const float* weight, const float* bias, float eps, int64_t rows,
                               int64_t width, int threads) {
  rows_of(threads, rows, width, [&](int64_t row) {
    const bf16* from = x + row * x_stride;
    if (residual) {
      add_row(residual + row * width, from, 1.0f, width);
      from = residual + row * width;
    }
    layer_norm_row(from, y + row * width, weight, bias, eps, width);
  });
}

// y [rows, width] = activation of x [rows, width], or of the first half of x [rows, 2 width] times
// the second; with `sparse`, as sparse_gated_row has it.
TGI_EXPORT void tgi_activate(const bf16* x, int64_t x_stride, bf16* y, int gated, int activation, int sparse,
                             float deviations, int64_t rows, int64_t width, int threads) {
  rows_of(threads, rows, width, [&](int64_t row) {
    const bf16* gate = x + row * x_stride;
    if (sparse) return sparse_gated_row(gate, y + row * width, width, activation, deviations);
    activate_row(gate, gated ? gate + width : nullptr, y + row * width, width, activation);
  });
}
