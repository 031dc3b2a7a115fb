// What a decoder does to each token's vector beside products and attention.
//
// All of it is computed in float32 and rounded to bfloat16 where torch's operations
// (tgi_cli/layers/ops.py) round; a row never depends on another.
#pragma once

#include "simd.h"

namespace tgi {

enum NormKind : int32_t { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };

// sum += scale * x over one row.
TGI_INLINE void add_row(bf16* sum, const bf16* x, float scale, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    f32x16 added = load(x + i);
    if (scale != 1.0f) added = through_bf16(added * scale);
    store(sum + i, load(sum + i) + added);
  }
  for (; i < width; ++i) {
    float added = scale == 1.0f ? to_float(x[i]) : to_float(to_bf16(to_float(x[i]) * scale));
    sum[i] = to_bf16(to_float(sum[i]) + added);
  }
}

// y = x * by over one row, where y may be either.
template <class By>
inline void multiply_row(const bf16* x, const By* by, bf16* y, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, load(x + i) * load(by + i));
  for (; i < width; ++i) y[i] = to_bf16(to_float(x[i]) * to_float(by[i]));
}

inline void scale_row(bf16* x, float factor, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(x + i, load(x + i) * factor);
  for (; i < width; ++i) x[i] = to_bf16(to_float(x[i]) * factor);
}

// y [width] = activation(gate) * up of gate_up [2 width], where the mean and so many standard
// deviations of its gates are taken off each gate, and those below 0 count as 0.
void sparse_gated_row(const bf16* gate_up, bf16* y, int64_t width, int32_t activation, float deviations);

// 1 / sqrt(mean(x^2) + eps)
inline float rms_scale(const bf16* x, float eps, int64_t width) {
  f32x16 sums[4] = {};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64)
    for (int part = 0; part < 4; ++part) {
      f32x16 value = load(x + i + 16 * part);
      sums[part] += value * value;
    }
  for (; i + 16 <= width; i += 16) {
    f32x16 value = load(x + i);
    sums[0] += value * value;
  }
  float squares = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; ++i) squares += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(squares / float(width) + eps);
}

// y = x * scale * weight; x may be y.
template <class Weight>
TGI_INLINE void scale_norm_row(const bf16* x, bf16* y, const Weight* weight, float scale, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < width; ++i) y[i] = to_bf16(to_float(x[i]) * scale * to_float(weight[i]));
}

// x / sqrt(mean(x^2) + eps) * weight (https://arxiv.org/abs/1910.07467); x may be y.
template <class Weight>
inline void rms_norm_row(const bf16* x, bf16* y, const Weight* weight, float eps, int64_t width) {
  scale_norm_row(x, y, weight, rms_scale(x, eps, width), width);
}

// (x - mean) / sqrt(variance + eps) * weight + bias (https://arxiv.org/abs/1607.06450)
inline void layer_norm_row(const bf16* x, bf16* y, const float* weight, const float* bias,
                           float eps, int64_t width) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]);
  float mean = float(sum / double(width));
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    float off = to_float(x[i]) - mean;
    squares += off * off;
  }
  float scale = 1.0f / std::sqrt(float(squares / double(width)) + eps);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    f32x16 value = (load(x + i) - mean) * scale * load(weight + i);
    store(y + i, bias ? value + load(bias + i) : value);
  }
  for (; i < width; ++i) {
    float value = (to_float(x[i]) - mean) * scale * weight[i];
    y[i] = to_bf16(bias ? value + bias[i] : value);
  }
}

// One head in pairs half of `rotated` apart: (a, b) -> (a cos - b sin, b cos + a sin). The first
// half of `sines` is negative already (https://arxiv.org/abs/2104.09864).
inline void rotate_head(bf16* head, const bf16* cosines, const bf16* sines, int64_t rotated) {
  int64_t half = rotated / 2;
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 a = load(head + i), b = load(head + half + i);
    f32x16 first = through_bf16(a * load(cosines + i)) + b * load(sines + i);
    f32x16 second = through_bf16(b * load(cosines + half + i)) + a * load(sines + half + i);
    store(head + i, first);
    store(head + half + i, second);
  }
  for (; i < half; ++i) {
    float a = to_float(head[i]), b = to_float(head[half + i]);
    float first = to_float(to_bf16(a * to_float(cosines[i]))) + b * to_float(sines[i]);
    float second =
        to_float(to_bf16(b * to_float(cosines[half + i]))) + a * to_float(sines[half + i]);
    head[i] = to_bf16(first);
    head[half + i] = to_bf16(second);
  }
}

}  // namespace tgi
