// The operations between products, one by one: for models that run module by module.
#include "elementwise.h"

#include "activation.h"
#include "pool.h"

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

// y = act(gate) for numbers in a row, times up if there is one.
void activate_row(const bf16* gate, const bf16* up, bf16* y, int64_t width, int activation) {
  auto one = [&](const bf16* from, const bf16* with, bf16* to) {
    f32x16 x = activate(load(from), activation);
    store(to, with ? through_bf16(x) * load(with) : x);
  };
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) one(gate + i, up ? up + i : nullptr, y + i);
  if (i == width) return;
  bf16 from[16] = {}, with[16] = {}, to[16];
  std::memcpy(from, gate + i, size_t(width - i) * sizeof(bf16));
  if (up) std::memcpy(with, up + i, size_t(width - i) * sizeof(bf16));
  one(from, up ? with : nullptr, to);
  std::memcpy(y + i, to, size_t(width - i) * sizeof(bf16));
}

}  // namespace
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
// the second.
TGI_EXPORT void tgi_activate(const bf16* x, int64_t x_stride, bf16* y, int gated, int activation,
                             int64_t rows, int64_t width, int threads) {
  rows_of(threads, rows, width, [&](int64_t row) {
    const bf16* gate = x + row * x_stride;
    activate_row(gate, gated ? gate + width : nullptr, y + row * width, width, activation);
  });
}
