// How a product is cut into pieces that threads take, and what a piece does in which order.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

#include "tile.h"

namespace tgi {

// Rows of a tile of a product in integers with AVX2: for sums of more there are no registers.
constexpr int INTEGER_TILE_ROWS = 4;

// A piece has at most so many rows, whose inputs, a slab at a time, fit into the second-level cache.
constexpr int64_t MAX_ROWS = 8 * TILE_ROWS;
constexpr int64_t MAX_PANELS = 8;
// Inputs of a slab: so much of a panel fits there, too.
constexpr int64_t SLAB = 1024;
// The same with a single tile, which reads a panel once.
constexpr int64_t LONG_SLAB = 4096;
// How far ahead a single tile fetches: what one core reads in some tenths of a microsecond.
constexpr int64_t FAR_AHEAD = 8192;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where the share `index` of `total` begins, divided into `count` nearly equal ones.
inline int64_t share(int64_t total, int64_t index, int64_t count) { return total * index / count; }

// Whether the processor begins two products of bfloat16 vectors per cycle: AMD's from Zen 5 on. As each takes six
// cycles, the twelve sums of a tile of six rows are too few to keep it busy.
inline bool begins_two_products() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 15) + (a >> 20 & 255) >= 26;  // the family
#else
  return false;
#endif
}
inline bool two_products = begins_two_products();

// Rows of a tile, at most. Where groups are short, sums of a group and of all groups are both in registers:
// to read and write the latter in memory would take up to a third of the time. Where two products begin per
// cycle, that pays off for groups of 16 alone, if codes become bfloat16: 4-bit codes in groups of 64 took 1.15
// to 1.2 times as long with tiles of six rows, and 6-bit codes in groups of 16 0.92 to 0.95 times.
inline int64_t tile_rows(const Matrix& weight) {
  if (!VNNI && weight.planes()) return INTEGER_TILE_ROWS;
  const int64_t longest = weight.planes() == 2 ? 0 : two_products && !weight.planes() ? 16 : 64;
  const bool keeps = TILE_ROWS == 12 && weight.group && weight.group <= longest;
  return keeps ? TILE_ROWS / 2 : TILE_ROWS;
}

// Tiles of a product. Memory decides how long one of 7 to 9 rows by 8-bit codes takes, if a single tile reads
// them: on a Zen 4, 0.78 times as long as two tiles whose sums are in registers.
inline int64_t count_tiles(const Matrix& weight, int64_t rows) {
  const bool single = VNNI && weight.planes() == 1 && weight.format == INT8 && rows <= 9;
  return ceil_div(rows, single ? TILE_ROWS : tile_rows(weight));
}

// A product in blocks of rows times stretches of panels.
struct Cut {
  int64_t panels, together, tiles, blocks, stretches;

  explicit Cut(const Linear& linear) {
    const Matrix& weight = *linear.weight;
    panels = weight.panels();
    together = weight.interleaved();
    tiles = count_tiles(weight, linear.rows);
    blocks = ceil_div(linear.rows, MAX_ROWS);
    stretches = 0;
    if (!blocks) return;
    // Nanoseconds of a panel, roughly; a piece of less than a microsecond is not worth its ticket.
    int64_t rows = ceil_div(linear.rows, blocks);
    int64_t cost = weight.panel_bytes() / 22 + rows * weight.in * PANEL / 100;
    int64_t least = std::min(ceil_div(1000, cost + 1), MAX_PANELS);
    int64_t length = std::clamp(panels * blocks * (1 + linear.beside) / 32, least, MAX_PANELS);
    stretches = ceil_div(panels, ceil_div(length, together) * together);
  }

  int64_t pieces() const { return blocks * stretches; }

  // The first panel of a stretch.
  int64_t panel(int64_t stretch) const {
    return std::min(panels, share(ceil_div(panels, together), stretch, stretches) * together);
  }
};

// The ticket that this thread probably takes next: as many further on as this one is from its last.
inline int64_t following(int64_t ticket, int64_t tickets) {
  static thread_local int64_t last = 0, step = 1;
  if (ticket > last) step = std::min<int64_t>(ticket - last, 16);
  last = ticket;
  return ticket + step < tickets ? ticket + step : ticket;
}

// A block of rows times a stretch of panels.
struct Piece {
  int64_t first_panel, panels, first_row, rows, tiles;
  int64_t slab;  // inputs that are multiplied before the next panel

  Piece(const Linear& linear, int64_t ticket)
      : cut_(linear), weight_(*linear.weight), ticket_(ticket), total_rows_(linear.rows) {
    // Neighbouring pieces have the same rows, which a thread still has in its cache.
    const int64_t block = ticket / cut_.stretches, stretch = ticket % cut_.stretches;
    first_panel = cut_.panel(stretch);
    panels = cut_.panel(stretch + 1) - first_panel;
    first_tile_ = share(cut_.tiles, block, cut_.blocks);
    tiles = share(cut_.tiles, block + 1, cut_.blocks) - first_tile_;
    first_row = 0;
    first_row = row(0);
    rows = row(tiles);
    const int64_t unit = weight_.group      ? weight_.group
                         : weight_.planes() ? weight_.block()
                                            : std::max<int64_t>(8, weight_.chunk_inputs());
    const int64_t limit = std::max((tiles > 1 ? SLAB : LONG_SLAB) / unit * unit, unit);
    const int64_t slabs = ceil_div(weight_.in, limit);
    slab = ceil_div(ceil_div(weight_.in, slabs), unit) * unit;
  }

  // The first panel of the thread's next piece, probably.
  const uint8_t* after() const {
    return weight_.panel(cut_.panel(following(ticket_, cut_.pieces()) % cut_.stretches));
  }

  // The first row of a tile, counted from the piece's first.
  int64_t row(int64_t tile) const { return share(total_rows_, first_tile_ + tile, cut_.tiles) - first_row; }

  // What a tile fetches while it multiplies `bytes` at `panel`, `chunk` of them at a time: a single tile
  // what is `far` behind, and then what it multiplies next.
  Ahead ahead(int64_t tile, const uint8_t* panel, int64_t bytes, int64_t chunk, const uint8_t* next,
              int64_t far = FAR_AHEAD) const {
    const auto never = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
    // From the second tile on, the panel is in the cache: without this, memory would be idle.
    if (tiles > 1) return {next + tile * (bytes / tiles), chunk / tiles, tiles > 2, never, nullptr};
    // With six or more rows, loads are too far apart to keep memory busy: on one thread, 8 rows of
    // bfloat16 take 1.1 times as long as one instead of 1.3 to 1.6, 12 rows 1.5 instead of 2.0 to 2.3.
    // Where a tile reads half a panel at a time, this fetches both: with AVX2, 4 rows took 0.6 times as long.
    return {panel + std::min(bytes, far), chunk, false, panel + bytes, next};
  }

 private:
  Cut cut_;
  const Matrix& weight_;
  int64_t ticket_, total_rows_, first_tile_;
};

}  // namespace tgi
