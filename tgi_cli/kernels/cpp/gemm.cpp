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
// Inputs of a slab: so much of a panel fits into the first-level cache, beside a tile's rows.
constexpr int64_t SLAB = 256;
constexpr int64_t MAX_SLAB = 512;  // where a group of inputs is longer
// A single tile has no use for a panel that is still in the cache.
constexpr int64_t LONG_SLAB = 4096;
constexpr int64_t MARGIN = 32;  // keeps the rows of a slab off each other's cache sets
constexpr int64_t MIN_GROUP = 32;

struct Scratch {
  alignas(64) float sums[MAX_PANELS * MAX_ROWS * PANEL];
  alignas(64) bf16 x[std::max(MAX_ROWS * (MAX_SLAB + MARGIN), TILE_ROWS * (LONG_SLAB + MARGIN))];
  alignas(64) uint8_t weights[MAX_SLAB * PANEL * 2];
  float x_sums[std::max(MAX_ROWS * MAX_SLAB, TILE_ROWS * LONG_SLAB) / MIN_GROUP];
};
thread_local Scratch scratch;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The `index`th of `count` nearly equal shares of `total` ends where the next begins.
int64_t share(int64_t total, int64_t index, int64_t count) { return total * index / count; }

// How a product is cut into pieces: blocks of rows times stretches of panels.
struct Cut {
  int64_t panels, tiles, blocks, stretches;

  explicit Cut(const Linear& linear) {
    const Matrix& weight = *linear.weight;
    panels = weight.panels();
    tiles = ceil_div(linear.rows, TILE_ROWS);
    blocks = ceil_div(tiles, MAX_TILES);
    stretches = 0;
    if (!blocks) return;
    // Nanoseconds of a panel, roughly; a piece of less than a microsecond is not worth its ticket.
    int64_t rows = ceil_div(linear.rows, blocks);
    int64_t cost = weight.panel_bytes() / 22 + rows * weight.in * PANEL / 100;
    int64_t least = std::min(ceil_div(1000, cost + 1), MAX_PANELS);
    int64_t length = std::clamp(panels * blocks / 32, least, MAX_PANELS);
    stretches = ceil_div(panels, length);
  }
};

template <class Panel, int ROWS>
void multiply_panel(const Tile& tile) {
  if constexpr (TILE_VECTORS == 2) {
    multiply<Panel, ROWS, 2>(tile);
  } else {
    multiply<Panel, ROWS, 1, 0>(tile);
    multiply<Panel, ROWS, 1, 1>(tile);
  }
}

template <class Panel>
void multiply_rows(const Tile& tile, int64_t rows) {
  switch (rows) {
    case 1: return multiply_panel<Panel, 1>(tile);
    case 2: return multiply_panel<Panel, 2>(tile);
    case 3: return multiply_panel<Panel, 3>(tile);
    case 4: return multiply_panel<Panel, 4>(tile);
#if defined(__AVX512F__)
    case 5: return multiply_panel<Panel, 5>(tile);
    case 6: return multiply_panel<Panel, 6>(tile);
    case 7: return multiply_panel<Panel, 7>(tile);
    case 8: return multiply_panel<Panel, 8>(tile);
    case 9: return multiply_panel<Panel, 9>(tile);
    case 10: return multiply_panel<Panel, 10>(tile);
    case 11: return multiply_panel<Panel, 11>(tile);
    case 12: return multiply_panel<Panel, 12>(tile);
#endif
  }
}

void multiply_format(int32_t format, const Tile& tile, int64_t rows) {
  if (format == INT4) return multiply_rows<Int4Panel>(tile, rows);
  if (format == INT8) return multiply_rows<Int8Panel>(tile, rows);
  return multiply_rows<Bf16Panel>(tile, rows);
}

template <class Panel>
void decode(const uint8_t* panel, int64_t chunks, uint8_t* to) {
  for (int64_t i = 0; i < chunks; ++i, panel += Panel::BYTES)
    for (int v = 0; v < 2; ++v) {
      u32x16 pairs[Panel::PAIRS];
      Panel::decode(panel, v, pairs);
      for (int pair = 0; pair < Panel::PAIRS; ++pair)
        std::memcpy(to + (i * Panel::PAIRS + pair) * Bf16Panel::BYTES + 64 * v, &pairs[pair], 64);
    }
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
  // Pieces of the same weights are neighbours: they are read from memory once.
  const int64_t block = ticket % cut.blocks, stretch = ticket / cut.blocks;
  const int64_t first_panel = share(cut.panels, stretch, cut.stretches);
  const int64_t panels = share(cut.panels, stretch + 1, cut.stretches) - first_panel;
  const int64_t first_tile = share(cut.tiles, block, cut.blocks);
  const int64_t tiles = share(cut.tiles, block + 1, cut.blocks) - first_tile;
  auto row_of = [&](int64_t tile) { return share(linear.rows, first_tile + tile, cut.tiles); };
  const int64_t first_row = row_of(0), rows = row_of(tiles) - first_row;

  const int64_t chunk = weight.chunk_inputs();
  const int64_t unit = weight.group ? weight.group : 8;
  const int64_t limit = std::max((tiles > 1 ? SLAB : LONG_SLAB) / unit * unit, unit);
  const int64_t slabs = ceil_div(weight.in, limit);
  const int64_t slab = ceil_div(ceil_div(weight.in, slabs), unit) * unit;
  const int64_t groups = weight.groups();
  const bool decodes = tiles > 1 && weight.format != BF16;
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

    for (int64_t p = 0; p < panels; ++p) {
      const int64_t panel = first_panel + p;
      const uint8_t* numbers = weight.panel(panel) + from / chunk * weight.chunk_bytes();
      int32_t format = weight.format;
      int64_t inputs = chunk, bytes = weight.chunk_bytes();  // of a chunk
      if (decodes) {
        if (format == INT4)
          decode<Int4Panel>(numbers, chunks, scratch.weights);
        else
          decode<Int8Panel>(numbers, chunks, scratch.weights);
        numbers = scratch.weights;
        format = BF16;
        inputs = 2;
        bytes = Bf16Panel::BYTES;
      }
      float* sums = scratch.sums + p * rows * PANEL;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = row_of(t) - first_row, tile_rows = row_of(t + 1) - first_row - row;
        Tile tile{};
        tile.x_stride = x_stride;
        tile.sums = sums + row * PANEL;
        tile.x_sums_stride = slab_groups;
        const int64_t step = weight.group ? weight.group : chunks * chunk;
        for (int64_t g = 0; g < slab_groups; ++g) {
          const int64_t start = g * step;
          tile.x = x + row * x_stride + start;
          tile.panel = numbers + start / inputs * bytes;
          // What is decoded is padded as its chunks are.
          tile.chunks = std::min(step, chunks * chunk - start) / inputs;
          tile.first = from + start == 0;
          if (weight.group) {
            const int64_t at = (panel * groups + from / weight.group + g) * PANEL;
            tile.scales = weight.scales + at;
            tile.zeros = weight.zeros ? weight.zeros + at : nullptr;
            tile.x_sums = scratch.x_sums + row * slab_groups + g;
          }
          multiply_format(format, tile, tile_rows);
        }
      }
      if (last) finish(linear, panel, first_row, rows, sums);
    }
  }
}

}  // namespace tgi

// One product on `threads` threads.
TGI_EXPORT void tgi_linear(const tgi::Linear* linear, int threads) {
  tgi::share_out(threads, tgi::linear_tickets(*linear),
                 [&](int64_t ticket, int) { tgi::linear_run(*linear, ticket); });
}
