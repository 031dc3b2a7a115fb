#include "gemm.h"

#include <cstdlib>
#include <memory>

#include "bit_planes.h"
#include "epilogue.h"
#include "gemm_integers.h"
#include "pieces.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr int64_t QUANTIZED_BYTES = 4 << 20;  // of rows that are quantized at a time
constexpr int64_t MARGIN = 32;  // keeps the rows of a slab off each other's cache sets
constexpr int64_t MIN_GROUP = 16;

// What 4-bit codes stand for where no table says it: -8 to 7, twice.
constexpr bf16 INTEGERS[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

struct Scratch {
  alignas(64) float sums[MAX_PANELS * MAX_ROWS * PANEL];
  alignas(64) Input x[std::max(MAX_ROWS * (SLAB + MARGIN), TILE_ROWS * (LONG_SLAB + MARGIN))];
  alignas(64) uint8_t decoded[SLAB / 2 * 4 * PANEL];  // a slab of a panel
  float x_sums[std::max(MAX_ROWS * SLAB, TILE_ROWS * LONG_SLAB) / MIN_GROUP];
};
thread_local Scratch scratch;

template <class Panel, int ROWS>
void multiply_panels(const Tile& tile, int64_t panels) {
  // Of few rows a panel alone makes too few sums at once to keep the processor busy.
  if constexpr (ROWS <= TWO_PANELS_ROWS && Panel::STRIDE > Panel::BYTES)
    if (panels == 2) return multiply<Panel, ROWS, 2 * PANEL_VECTORS>(tile);
  constexpr int VECTORS = ROWS <= WHOLE_PANEL_ROWS ? PANEL_VECTORS : TILE_VECTORS;
#if !defined(__AVX512F__)
  // There are just enough registers for the sums: scales of groups would move some of them to memory.
  if (tile.scales.kind == NO_GROUPS) {
    multiply<Panel, ROWS, VECTORS, 0, false>(tile);
    if constexpr (VECTORS < PANEL_VECTORS) multiply<Panel, ROWS, VECTORS, VECTORS, false>(tile);
    return;
  }
  if constexpr (2 * ROWS * VECTORS > SUMS) {
    multiply_groups<Panel, ROWS, VECTORS>(tile);
    if constexpr (VECTORS < PANEL_VECTORS) multiply_groups<Panel, ROWS, VECTORS, VECTORS>(tile);
    return;
  }
#endif
  multiply<Panel, ROWS, VECTORS>(tile);
  if constexpr (VECTORS < PANEL_VECTORS) multiply<Panel, ROWS, VECTORS, VECTORS>(tile);
}

template <class Panel>
void multiply_rows(const Tile& tile, int64_t rows, int64_t panels) {
  switch (rows) {
    case 1: return multiply_panels<Panel, 1>(tile, panels);
    case 2: return multiply_panels<Panel, 2>(tile, panels);
    case 3: return multiply_panels<Panel, 3>(tile, panels);
    case 4: return multiply_panels<Panel, 4>(tile, panels);
    case 5: return multiply_panels<Panel, 5>(tile, panels);
    case 6: return multiply_panels<Panel, 6>(tile, panels);
#if defined(__AVX512F__)
    case 7: return multiply_panels<Panel, 7>(tile, panels);
    case 8: return multiply_panels<Panel, 8>(tile, panels);
    case 9: return multiply_panels<Panel, 9>(tile, panels);
    case 10: return multiply_panels<Panel, 10>(tile, panels);
    case 11: return multiply_panels<Panel, 11>(tile, panels);
    case 12: return multiply_panels<Panel, 12>(tile, panels);
#endif
  }
}

void multiply_format(int32_t format, const Tile& tile, int64_t rows, int64_t panels) {
  if (format == INT4) return multiply_rows<Int4Panel>(tile, rows, panels);
  if constexpr (!VNNI)
    if (format == INT8) return multiply_rows<Int8Panel>(tile, rows, panels);
  if (format == FP8) return multiply_rows<Fp8Panel>(tile, rows, panels);
  if (format == INT5) return multiply_rows<BitPlanesPanel<5>>(tile, rows, panels);
  if (format == INT6) return multiply_rows<BitPlanesPanel<6>>(tile, rows, panels);
  return multiply_rows<Bf16Panel>(tile, rows, panels);
}

float sum_row(const bf16* x, int64_t length) {
#if defined(__AVX512BF16__)
  // Pairs times one.
  const u32x16 ones = u32x16{} + 0x3f803f80u;
  f32x16 pairs = splat(0.0f);
  for (; length >= 32; length -= 32, x += 32) pairs = dot2(pairs, ones, load_pairs(x));
  if (length) pairs = dot2(pairs, ones, (u32x16)_mm512_maskz_loadu_epi16((1u << length) - 1, x));
  return _mm512_reduce_add_ps((__m512)pairs);
#endif
  f32x16 lanes = splat(0.0f);
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) lanes += load(x + i);
  if (i < length) lanes += load_some(x + i, length - i);
  return sum_of(lanes);
}

// Numbers of a row of x, as products read them.
void copy_inputs(const bf16* x, int64_t length, Input* to) {
  if constexpr (WIDE_INPUTS)
    std::transform(x, x + length, to, [](bf16 number) { return to_float(number); });
  else
    std::memcpy(to, x, size_t(length) * sizeof(bf16));
}

// What a single tile fetches in one of two panels that alternate.
Ahead of_two(const Tile& tile, int64_t panel, const uint8_t* next) {
  constexpr int64_t BYTES = Int4Panel::BYTES;
  if (BYTE_PRODUCTS) return {next, BYTES, false, nullptr, nullptr};
  if (panel % 2) return {tile.panel, 0, true, nullptr, nullptr};
  // The other panel, while memory is read there.
  return {tile.panel + BYTES, 2 * BYTES, true, nullptr, nullptr};
}

// A piece of a product in bfloat16, to which codes are converted in registers, without loss.
void run_pairs(const Linear& linear, const Piece& piece) {
  const Matrix& weight = *linear.weight;
  const int64_t first_panel = piece.first_panel, panels = piece.panels;
  const int64_t rows = piece.rows, tiles = piece.tiles;
  const int64_t chunk = weight.chunk_inputs(), both = weight.interleaved(), slab = piece.slab;
  const bool pairs_up = rows <= TWO_PANELS_ROWS && both == 2;
  const bool bit_planes = weight.format == INT5 || weight.format == INT6;
  const bool conflicts = tiles > 1 && linear.x_stride % 1024 == 0;
  // The first of several tiles stores the decoded panel for the others. Not with 4-bit codes, AVX512-BF16
  // and tiles of many rows: there, decoding is hidden by the products, and storing is not.
  const bool hidden = VNNI && weight.format == INT4 && tile_rows(weight) == TILE_ROWS;
  const bool decodes = tiles > 1 && piece.row(1) >= DECODING_ROWS && weight.format != BF16 && !hidden;

  for (int64_t from = 0; from < weight.in; from += slab) {
    const int64_t length = std::min(slab, weight.in - from);
    const int64_t chunks = ceil_div(length, chunk);
    const int64_t slab_bytes = chunks * weight.chunk_bytes(), start = from / chunk * weight.chunk_stride();
    const bool last = from + length == weight.in;
    const bf16* narrow = linear.x + piece.first_row * linear.x_stride + from;
    int64_t x_stride = linear.x_stride;
    const Input* x = scratch.x;
    if (WIDE_INPUTS || conflicts || length % chunk) {
      x_stride = slab + MARGIN;
      for (int64_t row = 0; row < rows; ++row) {
        Input* to = scratch.x + row * x_stride;
        copy_inputs(narrow + row * linear.x_stride, length, to);
        std::fill(to + length, to + chunks * chunk, Input(0));
      }
    } else {
      x = reinterpret_cast<const Input*>(narrow);
    }
    const int64_t slab_groups = weight.group ? ceil_div(length, weight.group) : 1;
    if (weight.has_offsets())
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t g = 0; g < slab_groups; ++g)
          scratch.x_sums[g * rows + row] =
              -sum_row(narrow + row * linear.x_stride + g * weight.group,
                       std::min(weight.group, length - g * weight.group));

    int64_t at_once = 1;
    for (int64_t p = 0; p < panels; p += at_once) {
      at_once = pairs_up && p + 2 <= panels ? 2 : 1;
      const int64_t panel = first_panel + p;
      float* const sums = scratch.sums + p * rows * PANEL;
      if (from == 0 && weight.group) std::fill_n(sums, at_once * rows * PANEL, 0.0f);
      Tile tile{};
      tile.begins = from == 0;
      tile.panel = weight.panel(panel) + start;
      tile.x_stride = x_stride;
      tile.sums_stride = rows * PANEL;
      tile.chunks = chunks;
      tile.groups = slab_groups;
      tile.group_chunks = weight.group ? weight.group / chunk : chunks;
      tile.table = weight.table ? weight.table : INTEGERS;
      tile.scales = GroupScales(weight, panel, weight.group ? from / weight.group : 0);
      tile.x_sums_stride = rows;
      // Where multiply() fetches: to find it takes some percent of a row's product with 4-bit codes.
      const bool fetches = rows >= TILE_ROWS / 2 || at_once < both || bit_planes;
      const uint8_t* next = nullptr;
      if (fetches) {
        const int64_t next_panel = (panel / both + 1) * both;
        next = next_panel < first_panel + panels ? weight.panel(next_panel) + start
               : last                            ? piece.after()
                                                 : weight.panel(first_panel) + start + chunks * weight.chunk_stride();
        if (at_once < both) next += panel % both * slab_bytes;  // each of two panels fetches a half
      }
      int32_t format = weight.format;
      int64_t step = weight.chunk_bytes();
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = piece.row(t);
        tile.x = x + row * x_stride;
        tile.sums = sums + row * PANEL;
        tile.x_sums = scratch.x_sums + row;
        if (fetches)
          tile.ahead = tiles == 1 && both == 2 ? of_two(tile, panel, next)
                                               : piece.ahead(t, tile.panel, slab_bytes, step, next, FAR_AHEAD / step * step);
        tile.decoded = decodes && t == 0 ? scratch.decoded : nullptr;
        // Else finish() waits for memory, for 2 % of the time that the product takes.
        if (last && tiles > 1) fetch_results(linear, panel, piece.first_row + row, piece.row(t + 1) - row);
        multiply_format(format, tile, piece.row(t + 1) - row, at_once);
        if (tile.decoded) {
          format = BF16;
          tile.panel = scratch.decoded;
          tile.chunks *= chunk / 2;
          tile.group_chunks *= chunk / 2;
          step /= chunk / 2;
        }
      }
      if (last)
        for (int64_t i = 0; i < at_once; ++i)
          finish(linear, panel + i, piece.first_row, rows, sums + i * rows * PANEL);
    }
  }
}

}  // namespace

int64_t linear_tickets(const Linear& linear) { return Cut(linear).pieces(); }

void linear_run(const Linear& linear, const QuantizedRows& quantized, int64_t ticket) {
  const Piece piece(linear, ticket);
  if (linear.weight->planes()) return run_integers(linear, quantized, piece, scratch.sums);
  run_pairs(linear, piece);
}

}  // namespace tgi

// One product on `threads` threads.
TGI_EXPORT void tgi_linear(const tgi::Linear* linear, int threads) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t size = 0;
  tgi::Linear part = *linear;
  tgi::QuantizedRows quantized = {nullptr, tgi::quantized_stride(*linear->weight)};
  // Rows are quantized some at a time, into memory that the thread keeps.
  const int64_t most = quantized.stride ? std::max(tgi::QUANTIZED_BYTES / quantized.stride, tgi::MAX_ROWS) /
                                              tgi::MAX_ROWS * tgi::MAX_ROWS
                                        : linear->rows;
  const int64_t bytes = std::min(most, linear->rows) * quantized.stride;
  if (bytes > size) {
    memory.reset(std::aligned_alloc(64, size_t(bytes)));
    size = bytes;
  }
  quantized.first = static_cast<uint8_t*>(memory.get());
  const int64_t y_bytes = linear->y_stride * (linear->epilogue == tgi::FLOAT ? 4 : 2);
  for (int64_t row = 0; row < linear->rows; row += most) {
    part.rows = std::min(most, linear->rows - row);
    part.x = linear->x + row * linear->x_stride;
    part.y = static_cast<uint8_t*>(linear->y) + row * y_bytes;
    tgi::share_out(threads, tgi::quantize_tickets(part),
                   [&](int64_t ticket, int) { tgi::quantize_run(part, quantized, ticket); });
    tgi::share_out(threads, tgi::linear_tickets(part),
                   [&](int64_t ticket, int) { tgi::linear_run(part, quantized, ticket); });
  }
}

// Whether this library multiplies codes of integers as bytes.
TGI_EXPORT int tgi_multiplies_bytes() { return tgi::BYTE_PRODUCTS; }

// For tests: compute as a processor does that begins two products per cycle, or one that does not; returns what it
// was before.
TGI_EXPORT int tgi_begin_two_products(int two) {
  const int before = tgi::two_products;
  tgi::two_products = two;
  return before;
}
