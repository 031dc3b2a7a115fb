// The operations between products, one by one: for models that run module by module.
#include "elementwise.h"

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
