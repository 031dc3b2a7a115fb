// The scales of groups of inputs, as products read them.
#pragma once

#include "vectors.h"

namespace tgi {

// How the scales of groups are stored, and the offsets beside them, if there are any.
enum ScaleKind { NO_GROUPS, WIDE, HALVES, TWO_LEVELS };

// A matrix's scales, from a group of a panel on. A number is scale * (code - middle) - offset.
struct GroupScales {
  ScaleKind kind;
  bool offsets;
  const float* scales;   // WIDE: of groups; TWO_LEVELS: of supergroups
  const float* minima;   // beside them. WIDE: zeros, which are scaled; or null
  const uint8_t* codes;  // HALVES: float16; TWO_LEVELS: int8
  const uint8_t* minimum_codes;
  int64_t stride, code_stride;  // to the next panel's, in numbers and in bytes
  int64_t group;                // the first one
  int shift;
  float minus_middle;

  GroupScales() = default;
  GroupScales(const Matrix& weight, int64_t panel, int64_t first)
      : kind(!weight.group         ? NO_GROUPS
             : !weight.scale_codes ? WIDE
             : !weight.scales      ? HALVES
                                   : TWO_LEVELS),
        offsets(weight.has_offsets()),
        scales(nullptr),
        minima(nullptr),
        codes(nullptr),
        minimum_codes(nullptr),
        stride((kind == TWO_LEVELS ? weight.supergroups() : weight.groups()) * PANEL),
        code_stride(weight.groups() * PANEL * (kind == HALVES ? 2 : 1)),
        group(first),
        shift(kind == TWO_LEVELS ? weight.super_shift : 0),
        minus_middle(-float(weight.middle())) {
    if (kind == NO_GROUPS) return;
    if (weight.scales) scales = weight.scales + panel * stride;
    if (weight.zeros) minima = weight.zeros + panel * stride;
    if (weight.scale_codes) codes = static_cast<const uint8_t*>(weight.scale_codes) + panel * code_stride;
    if (weight.minimum_codes)
      minimum_codes = static_cast<const uint8_t*>(weight.minimum_codes) + panel * code_stride;
  }

  // Scales and offsets of so many vectors of a panel, or of all of two panels, in the index-th group.
  template <int VECTORS, int FIRST>
  TGI_INLINE void of_group(int64_t index, Floats* scale, Floats* offset) const {
    const Floats less = Floats{} + minus_middle;
    const int64_t at = (group + index) * PANEL, above = ((group + index) >> shift) * PANEL;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t first = WIDTH * (v % PANEL_VECTORS + FIRST), panel = v / PANEL_VECTORS;
      const int64_t code = panel * code_stride + (at + first) * (kind == HALVES ? 2 : 1);
      const int64_t wide = panel * stride + above + first;
      if (kind == HALVES) {
        scale[v] = floats_of_halves(codes + code);
        if (offsets) offset[v] = multiply_add(scale[v], less, floats_of_halves(minimum_codes + code));
      } else if (kind == TWO_LEVELS) {
        scale[v] = read<Floats>(scales + wide) * floats_of<true>(codes + code);
        if (!offsets) continue;
        const Floats minimum = read<Floats>(minima + wide) * floats_of<false>(minimum_codes + code);
        offset[v] = multiply_add(scale[v], less, minimum);
      } else {
        scale[v] = read<Floats>(scales + wide);
        if (offsets) offset[v] = scale[v] * read<Floats>(minima + wide);
      }
    }
  }
};

}  // namespace tgi
