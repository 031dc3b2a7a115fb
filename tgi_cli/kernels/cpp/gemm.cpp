#include "gemm.h"

#include <algorithm>

#include "activation.h"
#include "tile.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// A piece has so many tiles of rows: their inputs, a slab at a time, stay in the second-level cache.
constexpr int64_t MAX_TILES = 8;
constexpr int64_t MAX_ROWS = MAX_TILES * TILE_ROWS;
constexpr int64_t MAX_PANELS = 8;
// Inputs of a slab: so much of a panel comes quickly out of the second-level cache, too.
constexpr int64_t SLAB = 1024;
// A single tile has no use for a panel that is still in the cache.
constexpr int64_t LONG_SLAB = 4096;
// How far a single tile fetches: a few microseconds of what one core reads.
constexpr int64_t FAR_AHEAD = 8192;
constexpr bool FETCHES_FAR = TILE_ROWS == 12;
constexpr int64_t MARGIN = 32;  // keeps the rows of a slab off each other's cache sets
constexpr int64_t MIN_GROUP = 32;

// What 4-bit codes stand for where no table says it: -8 to 7, twice.
constexpr bf16 INTEGERS[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

struct Scratch {
  alignas(64) float sums[MAX_PANELS * MAX_ROWS * PANEL];
  alignas(64) bf16 x[std::max(MAX_ROWS * (SLAB + MARGIN), TILE_ROWS * (LONG_SLAB + MARGIN))];
  float x_sums[std::max(MAX_ROWS * SLAB, TILE_ROWS * LONG_SLAB) / MIN_GROUP];
};
thread_local Scratch scratch;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The `index`th of `count` nearly equal shares of `total` ends where the next begins.
int64_t share(int64_t total, int64_t index, int64_t count) { return total * index / count; }

// How a product is cut into pieces: blocks of rows times stretches of panels.
struct Cut {
  int64_t panels, together, tiles, blocks, stretches;

  explicit Cut(const Linear& linear) {
    const Matrix& weight = *linear.weight;
    panels = weight.panels();
    together = weight.interleaved();
    tiles = ceil_div(linear.rows, TILE_ROWS);
    blocks = ceil_div(tiles, MAX_TILES);
    stretches = 0;
    if (!blocks) return;
    // Nanoseconds of a panel, roughly; a piece of less than a microsecond is not worth its ticket.
    int64_t rows = ceil_div(linear.rows, blocks);
    int64_t cost = weight.panel_bytes() / 22 + rows * weight.in * PANEL / 100;
    int64_t least = std::min(ceil_div(1000, cost + 1), MAX_PANELS);
    int64_t length = std::clamp(panels * blocks / 32, least, MAX_PANELS);
    stretches = ceil_div(panels, ceil_div(length, together) * together);
  }

  // The first of a stretch.
  int64_t panel(int64_t stretch) const {
    return std::min(panels, share(ceil_div(panels, together), stretch, stretches) * together);
  }
};

template <class Panel, int ROWS>
void multiply_panels(const Tile& tile, int64_t panels) {
  // Of few rows a panel alone makes too few sums at once to keep the processor busy.
  if constexpr (ROWS <= TWO_PANELS_ROWS && Panel::STRIDE > Panel::BYTES)
    if (panels == 2) return multiply<Panel, ROWS, 2 * PANEL_VECTORS>(tile);
  constexpr int VECTORS = ROWS <= 2 ? PANEL_VECTORS : TILE_VECTORS;
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
#if defined(__AVX512F__)
    case 5: return multiply_panels<Panel, 5>(tile, panels);
    case 6: return multiply_panels<Panel, 6>(tile, panels);
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
  if (format == INT8) return multiply_rows<Int8Panel>(tile, rows, panels);
  if (format == FP8) return multiply_rows<Fp8Panel>(tile, rows, panels);
  return multiply_rows<Bf16Panel>(tile, rows, panels);
}

f32x16 load_some(const bf16* from, int64_t count) {
  if (count == 16) return load(from);
  bf16 some[16] = {};
  std::copy_n(from, count, some);
  return load(some);
}

void store_some(bf16* to, f32x16 x, int64_t count) {
  if (count == 16) return store(to, x);
  bf16 all[16];
  store(all, x);
  std::copy_n(all, count, to);
}

void store_some(float* to, f32x16 x, int64_t count) {
  if (count == 16) return store(to, x);
  float all[16];
  store(all, x);
  std::copy_n(all, count, to);
}

// Sums [rows][32] of a panel become what is asked for, in rows of y from `row` on.
void finish(const Linear& linear, int64_t panel, int64_t row, int64_t rows, const float* sums) {
  const Matrix& weight = *linear.weight;
  int64_t first[2], count[2];
  f32x16 bias[2], scale[2];
  for (int half = 0; half < 2; ++half) {
    first[half] = weight.first_output(panel, half);
    count[half] = weight.outputs(panel, half);
    if (linear.bias) bias[half] = load_some(linear.bias + first[half], count[half]);
    if (weight.scales && !weight.group) scale[half] = load(weight.scales + panel * PANEL + 16 * half);
  }
  auto product = [&](int half) {
    f32x16 x = load(sums + 16 * half);
    if (weight.scales && !weight.group) x *= scale[half];
    if (linear.bias) x += bias[half];
    return x;
  };
  for (int64_t end = row + rows; row < end; ++row, sums += PANEL) {
    bf16* y = static_cast<bf16*>(linear.y) + row * linear.y_stride;
    if (linear.epilogue == GATED) {
      f32x16 gate = through_bf16(activate(through_bf16(product(0)), linear.activation));
      store_some(y + first[0], gate * through_bf16(product(1)), count[0]);
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      bf16* to = y + first[half];
      f32x16 x = product(half);
      switch (linear.epilogue) {
        case ADD:
          x = through_bf16(x);
          if (linear.scale != 1.0f) x = through_bf16(x * linear.scale);
          store_some(to, load_some(to, count[half]) + x, count[half]);
          break;
        case ACTIVATE:
          store_some(to, activate(through_bf16(x), linear.activation), count[half]);
          break;
        case FLOAT:
          store_some(static_cast<float*>(linear.y) + row * linear.y_stride + first[half],
                     through_bf16(x), count[half]);
          break;
        default:
          store_some(to, x, count[half]);
      }
    }
  }
}

float sum_row(const bf16* x, int64_t length) {
  f32x16 lanes = splat(0.0f);
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) lanes += load(x + i);
  if (i < length) lanes += load_some(x + i, length - i);
  return sum_of(lanes);
}

}  // namespace

int64_t linear_tickets(const Linear& linear) {
  Cut cut(linear);
  return cut.blocks * cut.stretches;
}

void linear_run(const Linear& linear, int64_t ticket) {
  const Matrix& weight = *linear.weight;
  const Cut cut(linear);
  // Pieces of the same rows are neighbours, which a thread has in its cache from the one before.
  const int64_t block = ticket / cut.stretches, stretch = ticket % cut.stretches;
  const int64_t first_panel = cut.panel(stretch);
  const int64_t panels = cut.panel(stretch + 1) - first_panel;
  const int64_t first_tile = share(cut.tiles, block, cut.blocks);
  const int64_t tiles = share(cut.tiles, block + 1, cut.blocks) - first_tile;
  auto row_of = [&](int64_t tile) { return share(linear.rows, first_tile + tile, cut.tiles); };
  const int64_t first_row = row_of(0), rows = row_of(tiles) - first_row;

  const int64_t chunk = weight.chunk_inputs();
  const int64_t unit = weight.group ? weight.group : 8;
  const int64_t limit = std::max((tiles > 1 ? SLAB : LONG_SLAB) / unit * unit, unit);
  const int64_t slabs = ceil_div(weight.in, limit);
  const int64_t slab = ceil_div(ceil_div(weight.in, slabs), unit) * unit;
  const bool pairs_up = rows <= TWO_PANELS_ROWS && weight.interleaved() == 2;
  const bool conflicts = tiles > 1 && linear.x_stride % 1024 == 0;

  for (int64_t from = 0; from < weight.in; from += slab) {
    const int64_t length = std::min(slab, weight.in - from);
    const int64_t chunks = ceil_div(length, chunk);
    const bool last = from + length == weight.in;
    const bf16* x = linear.x + first_row * linear.x_stride + from;
    int64_t x_stride = linear.x_stride;
    if (conflicts || length % chunk) {
      x_stride = slab + MARGIN;
      for (int64_t row = 0; row < rows; ++row) {
        bf16* to = scratch.x + row * x_stride;
        std::memcpy(to, x + row * linear.x_stride, size_t(length) * sizeof(bf16));
        std::fill(to + length, to + chunks * chunk, bf16(0));
      }
      x = scratch.x;
    }
    const int64_t slab_groups = weight.group ? ceil_div(length, weight.group) : 1;
    if (weight.zeros)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t g = 0; g < slab_groups; ++g)
          scratch.x_sums[row * slab_groups + g] =
              sum_row(x + row * x_stride + g * weight.group,
                      std::min(weight.group, length - g * weight.group));

    int64_t at_once = 1;
    for (int64_t p = 0; p < panels; p += at_once) {
      at_once = pairs_up && p + 2 <= panels ? 2 : 1;
      const int64_t panel = first_panel + p;
      const int64_t slab_bytes = chunks * weight.chunk_bytes();
      float* const sums = scratch.sums + p * rows * PANEL;
      Tile tile{};
      tile.panel = weight.panel(panel) + from / chunk * weight.chunk_stride();
      tile.ahead = tile.panel;
      tile.x_stride = x_stride;
      tile.sums_stride = rows * PANEL;
      tile.chunks = chunks;
      tile.groups = slab_groups;
      tile.group_chunks = weight.group ? weight.group / chunk : chunks;
      tile.first = from == 0;
      tile.table = weight.table ? weight.table : INTEGERS;
      if (weight.group) {
        const int64_t at = (panel * weight.groups() + from / weight.group) * PANEL;
        tile.scales = weight.scales + at;
        tile.zeros = weight.zeros ? weight.zeros + at : nullptr;
        tile.scales_stride = weight.groups() * PANEL;
      }
      if (tiles > 1) {  // memory would have nothing to do from the second tile on
        const int64_t both = weight.interleaved();
        tile.ahead = weight.panel((panel / both + 1) * both) +
                     from / chunk * weight.chunk_stride() + panel % both * slab_bytes;
        tile.ahead_step = weight.chunk_bytes() / tiles;
        tile.ahead_near = tiles > 2;
      } else if (at_once < weight.interleaved() && panel % 2 == 0) {
        tile.ahead += weight.chunk_bytes();  // of the other panel, while memory is read there
        tile.ahead_step = weight.chunk_stride();
        tile.ahead_near = true;
      } else if (FETCHES_FAR && weight.interleaved() == 1) {
        // With six rows and more, loads are too far apart to keep the memory busy: on one thread, 8
        // rows of bfloat16 take 1.1 times as long as one instead of 1.3 to 1.6, 12 rows 1.5 instead
        // of 2.0 to 2.3.
        tile.ahead += FAR_AHEAD;
        tile.ahead_step = weight.chunk_stride();
      }
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = row_of(t) - first_row;
        tile.x = x + row * x_stride;
        tile.sums = sums + row * PANEL;
        tile.x_sums = scratch.x_sums + row * slab_groups;
        multiply_format(weight.format, tile, row_of(t + 1) - first_row - row, at_once);
        if (tiles > 1) tile.ahead += slab_bytes / tiles;
      }
      if (last)
        for (int64_t i = 0; i < at_once; ++i)
          finish(linear, panel + i, first_row, rows, sums + i * rows * PANEL);
    }
  }
}

}  // namespace tgi

// One product on `threads` threads.
TGI_EXPORT void tgi_linear(const tgi::Linear* linear, int threads) {
  tgi::share_out(threads, tgi::linear_tickets(*linear),
                 [&](int64_t ticket, int) { tgi::linear_run(*linear, ticket); });
}
