// Weights [out, in] into panels of 32 outputs, and out of them.
//
// bf16: [pairs of inputs][32 outputs][2 inputs], so that a vector has a pair for 16 outputs.
// fp8: the same, of e4m3 codes.
// int8: [fours of inputs][32 outputs][4 inputs], of a number plus 128, as products of bytes take them.
// int4: [8 inputs][2 x 16 outputs][word 0 or 1][4 codes], of a number plus 8 in four bits: word w
//   has the inputs w, w + 2, w + 4 and w + 6, the lowest bits first. A vector, shifted by 4 i bits,
//   has in the lowest bits of its words the i-th pair for 16 outputs. Where a table says what codes
//   stand for, codes are what is stored.
// Panels are padded with the codes of zero in both directions. Of int4, two panels alternate: 128 bytes
// of one, 128 of the other.
#include <type_traits>

#include "fp8.h"
#include "matrix.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Where input i of an output is within its panel: a byte, and of int4, int5 and int6 four bits of it.
struct Place {
  int64_t byte;
  int shift;
};

Place place_of(int32_t format, int output, int64_t input) {
  if (format == BF16) return {input / 2 * 128 + output * 4 + input % 2 * 2, 0};
  if (format == FP8) return {input / 2 * 64 + output * 2 + input % 2, 0};
  if (format == INT8) return {input / 4 * 128 + output * 4 + input % 4, 0};
  const int nibble = int(input % 8 / 2);
  const int64_t byte = output * 4 + input % 2 * 2 + nibble / 2;
  const int64_t before = format == INT5   ? input / 16 * 320 + input / 8 % 2 * 128
                         : format == INT6 ? input / 8 * 192
                                          : input / 8 * 256;
  return {before + byte, nibble % 2 * 4};
}

// Where its upper bits are, of int5 and int6.
Place upper_place(int32_t format, int output, int64_t input) {
  const int bits = format == INT6 ? 2 : 1;
  const int nibble = int(input % 8 / 2);
  const int64_t byte = output % 16 * 4 + input % 2 * 2 + nibble / 2;
  const int fours = int(format == INT5 ? input / 8 % 2 * 2 : 0) + nibble % 2;
  const int field = output / 16 * (format == INT5 ? 4 : 2) + fours;
  return {(format == INT5 ? input / 16 * 320 + 256 : input / 8 * 192 + 128) + byte, bits * field};
}

int read_code(int32_t format, const uint8_t* panel, int output, int64_t input) {
  const Place place = place_of(format, output, input);
  if (format == INT8 || format == FP8) return panel[place.byte];
  const int code = panel[place.byte] >> place.shift & 15;
  if (format == INT4) return code;
  const Place upper = upper_place(format, output, input);
  return code | (panel[upper.byte] >> upper.shift & (format == INT6 ? 3 : 1)) << 4;
}

// Other bits of a byte keep what they are.
void put_bits(uint8_t& byte, int shift, int mask, int bits) {
  byte = uint8_t((byte & ~(mask << shift)) | (bits & mask) << shift);
}

void write_code(int32_t format, uint8_t* panel, int output, int64_t input, uint8_t code) {
  const Place place = place_of(format, output, input);
  if (format == INT8 || format == FP8) {
    panel[place.byte] = code;
    return;
  }
  put_bits(panel[place.byte], place.shift, 15, code);
  if (format == INT4) return;
  const Place upper = upper_place(format, output, input);
  put_bits(panel[upper.byte], upper.shift, format == INT6 ? 3 : 1, code >> 4);
}

// The number that a code stands for, before it is scaled.
float number_of(const Matrix& m, int code) {
  if (m.format == FP8) return to_float(fp8_to_bf16(uint8_t(code), E4M3));
  return m.table ? to_float(m.table[code]) : float(code - m.middle());
}

// Codes of zero, and zeros in bfloat16 and e4m3.
void fill_blank(const Matrix& m, uint8_t* chunk) {
  const int64_t lower = m.format == INT5 ? 256 : 128;
  const int blank = m.format == INT8 ? 0x80 : m.format == INT4 ? 0x88 : 0;
  std::memset(chunk, blank, size_t(m.chunk_bytes()));
  if (m.format == INT5 || m.format == INT6)
    std::memset(chunk + lower, m.format == INT6 ? 0xaa : 0xff, size_t(m.chunk_bytes() - lower));
}

// visit(output within it, output of the weight) for each there is.
template <class Visit>
void each_output(const Matrix& matrix, int64_t panel, const Visit& visit) {
  for (int half = 0; half < 2; ++half) {
    int64_t first = matrix.first_output(panel, half), count = matrix.outputs(panel, half);
    for (int64_t i = 0; i < count; ++i) visit(int(half * 16 + i), first + i);
  }
}

// 16 pairs at a time, so that a panel's part stays in the cache while its outputs come one by one.
constexpr int64_t STRETCH = 32;

// What an integer, or a table's number, of an output and a group stands for.
struct Scaled {
  float scale, zero, minimum;

  Scaled(const Matrix& m, int64_t panel, int64_t group, int output) : scale(1), zero(0), minimum(0) {
    if (!m.scales && !m.scale_codes) return;
    if (!m.scale_codes) {
      const int64_t at = (panel * m.groups() + group) * PANEL + output;
      scale = m.scales[at];
      if (m.zeros) zero = m.zeros[at];
      return;
    }
    const int64_t at = (panel * m.groups() + group) * PANEL + output;
    if (m.minimum_codes) zero = float(-m.middle());
    if (!m.scales) {
      scale = half_to_float(static_cast<const uint16_t*>(m.scale_codes)[at]);
      if (m.minimum_codes) minimum = half_to_float(static_cast<const uint16_t*>(m.minimum_codes)[at]);
      return;
    }
    const int64_t wide = (panel * m.supergroups() + (group >> m.super_shift)) * PANEL + output;
    scale = m.scales[wide] * float(static_cast<const int8_t*>(m.scale_codes)[at]);
    if (m.minimum_codes) minimum = m.zeros[wide] * float(static_cast<const uint8_t*>(m.minimum_codes)[at]);
  }

  float operator()(float number) const { return (number - zero) * scale - minimum; }
};

// Numbers of rows that are worth a ticket.
constexpr int64_t ROW_TICKET = 8192;

template <class Number, class Put>
void pack(const Matrix& matrix, const Number* numbers, int64_t stride, int threads, const Put& put) {
  share_out(threads, matrix.panels(), [&](int64_t panel, int) {
    uint8_t* to = const_cast<uint8_t*>(matrix.panel(panel));
    for (int64_t chunk = 0; chunk < matrix.chunks(); ++chunk)
      fill_blank(matrix, to + chunk * matrix.chunk_stride());
    for (int64_t from = 0; from < matrix.in; from += STRETCH) {
      int64_t end = from + STRETCH < matrix.in ? from + STRETCH : matrix.in;
      each_output(matrix, panel, [&](int place, int64_t output) {
        const Number* row = numbers + output * stride;
        for (int64_t i = from; i < end; ++i) put(to, place, i, row[i]);
      });
    }
  });
}

}  // namespace
}  // namespace tgi

using namespace tgi;

// weight [out, in] with `stride` between rows.
TGI_EXPORT void tgi_pack_bf16(const Matrix* matrix, const bf16* weight, int64_t stride,
                              int threads) {
  pack(*matrix, weight, stride, threads, [](uint8_t* to, int output, int64_t input, bf16 number) {
    std::memcpy(to + place_of(BF16, output, input).byte, &number, 2);
  });
}

// codes [out, in] of 4 to 8 bits, a byte each; of integers the one in the middle stands for 0.
TGI_EXPORT void tgi_pack_codes(const Matrix* matrix, const uint8_t* codes, int64_t stride,
                               int threads) {
  auto pack_as = [&](auto format) {  // a constant, for which the compiler knows all places
    pack(*matrix, codes, stride, threads, [](uint8_t* to, int output, int64_t input, uint8_t code) {
      write_code(decltype(format)::value, to, output, input, code);
    });
  };
  switch (matrix->format) {
    case INT8: return pack_as(std::integral_constant<int32_t, INT8>());
    case INT6: return pack_as(std::integral_constant<int32_t, INT6>());
    case INT5: return pack_as(std::integral_constant<int32_t, INT5>());
    case INT4: return pack_as(std::integral_constant<int32_t, INT4>());
    default: return pack_as(std::integral_constant<int32_t, FP8>());
  }
}

// The numbers [out, in] as float32, scaled.
TGI_EXPORT void tgi_unpack(const Matrix* matrix, float* weight, int threads) {
  const Matrix& m = *matrix;
  share_out(threads, m.panels(), [&](int64_t panel, int) {
    const uint8_t* from = m.panel(panel);
    each_output(m, panel, [&](int output, int64_t row) {
      for (int64_t i = 0; i < m.in; ++i) {
        float number;
        if (m.format == BF16)
          number = to_float(*reinterpret_cast<const bf16*>(from + place_of(BF16, output, i).byte));
        else
          number = number_of(m, read_code(m.format, from, output, i));
        weight[row * m.in + i] = Scaled(m, panel, m.group ? i / m.group : 0, output)(number);
      }
    });
  });
}

namespace tgi {
namespace {

// Row `row` of codes, as bfloat16.
void decode_row(const Matrix& m, int64_t row, bf16* to) {
  const int64_t panel = row / PANEL, stride = m.chunk_stride(), chunk = m.chunk_inputs();
  const int output = int(row % PANEL);
  const int64_t group = m.group ? m.group : m.in;
  for (int64_t from = 0; from < m.in; from += group) {
    const int64_t end = from + group < m.in ? from + group : m.in;
    const Scaled scaled(m, panel, from / group, output);
    for (int64_t first = from; first < end; first += chunk) {
      const uint8_t* bytes = m.panel(panel) + first / chunk * stride;
      const int64_t count = end - first < chunk ? end - first : chunk;
      for (int64_t i = 0; i < count; ++i)
        to[first + i] = to_bf16(scaled(number_of(m, read_code(m.format, bytes, output, i))));
    }
  }
}

}  // namespace
}  // namespace tgi

// Rows `ids` of a matrix that is not paired, to y with `stride` between rows: -1, or where in
// ids the first one is that there is no row for; then nothing was written. A row is read from as many
// lines of the cache as it has pairs: one of 576 numbers in bf16 takes 3 to 6 us more than a plain
// table's, and 512 of them, on one core that others used, too, 1.2 ms more.
TGI_EXPORT int64_t tgi_rows(const Matrix* matrix, const int64_t* ids, int64_t count, bf16* y,
                            int64_t stride, int threads) {
  const Matrix& m = *matrix;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= m.out) return i;
  const int64_t share = m.in < ROW_TICKET ? ROW_TICKET / (m.in > 0 ? m.in : 1) : 1;
  share_out(threads, (count + share - 1) / share, [&](int64_t ticket, int) {
    const int64_t end = (ticket + 1) * share < count ? (ticket + 1) * share : count;
    for (int64_t row = ticket * share; row < end; ++row) {
      bf16* to = y + row * stride;
      if (m.format != BF16) {
        decode_row(m, ids[row], to);
        continue;
      }
      const Place place = place_of(BF16, int(ids[row] % PANEL), 0);
      const uint8_t* from = m.panel(ids[row] / PANEL) + place.byte;
      int64_t pair = 0;
      for (; pair < m.in / 2; ++pair) std::memcpy(to + 2 * pair, from + pair * m.chunk_bytes(), 4);
      if (m.in % 2) std::memcpy(to + 2 * pair, from + pair * m.chunk_bytes(), 2);
    }
  });
  return -1;
}
