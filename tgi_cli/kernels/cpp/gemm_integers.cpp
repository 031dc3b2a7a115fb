#include "gemm_integers.h"

#include "bit_planes.h"
#include "epilogue.h"
#include "integer_blocks.h"

namespace tgi {

#if TGI_BYTE_PRODUCTS

namespace {

void multiply_format(const Matrix& weight, const IntegerTile& tile, int64_t rows, int64_t panels) {
  if (weight.format == INT4 && panels == 2)
    multiply_integer_rows<Int4Codes, 1, 2, TWO_INTEGER_PANELS_ROWS>(tile, rows);
  else if (weight.format == INT4)
    multiply_integer_rows<Int4Codes, 1>(tile, rows);
  else if (weight.format == INT5)
    multiply_integer_rows<BitPlanesCodes<5>, 1>(tile, rows);
  else if (weight.format == INT6)
    multiply_integer_rows<BitPlanesCodes<6>, 1>(tile, rows);
  else if (weight.planes() == 1)
    multiply_integer_rows<Int8Codes, 1>(tile, rows);
  else
    multiply_integer_rows<Int8Codes, 2>(tile, rows);
}

#if defined(__AVX512VNNI__)

// To decode codes again takes no longer than to read what was decoded.
bool multiply_decoded(const Matrix&, const IntegerTile&, const Piece&, const uint8_t*) { return false; }

#else

// If there are more than a few rows, multiply all of a piece by codes that are decoded once for them.
bool multiply_decoded(const Matrix& weight, const IntegerTile& tile, const Piece& piece, const uint8_t* next) {
  if (piece.rows <= FEW_ROWS) return false;
  switch (weight.format) {
    case INT4: multiply_in_runs<Int4Codes>(tile, piece, next); break;
    case INT5: multiply_in_runs<BitPlanesCodes<5>>(tile, piece, next); break;
    case INT6: multiply_in_runs<BitPlanesCodes<6>>(tile, piece, next); break;
    default: multiply_in_runs<Int8Codes>(tile, piece, next);
  }
  return true;
}

#endif

}  // namespace

void run_integers(const Linear& linear, const QuantizedRows& quantized, const Piece& piece, float* all_sums) {
  const Matrix& weight = *linear.weight;
  const int64_t first_panel = piece.first_panel, panels = piece.panels;
  const int64_t rows = piece.rows, tiles = piece.tiles;
  const int64_t chunk = weight.chunk_inputs(), block = weight.block(), slab = piece.slab;
  const int64_t numbers = quantized_numbers(weight), blocks = quantized_blocks(weight);
  const int64_t planes = weight.planes(), both = weight.interleaved();
  const bool pairs_up = rows <= TWO_INTEGER_PANELS_ROWS && both == 2;
  // At least a block: the first of two passes over it reads twice as fast as it fetches. In whole chunks.
  const int64_t far = std::max(FAR_AHEAD / weight.chunk_bytes(), block / chunk) * weight.chunk_bytes();

  for (int64_t from = 0; from < weight.in; from += slab) {
    const int64_t chunks = ceil_div(std::min(slab, weight.in - from), chunk);
    const int64_t bytes = chunks * weight.chunk_stride(), start = from / chunk * weight.chunk_stride();
    const bool last = from + slab >= weight.in;
    int64_t at_once = 1;
    for (int64_t p = 0; p < panels; p += at_once) {
      at_once = pairs_up && p + 2 <= panels ? 2 : 1;
      const int64_t panel = first_panel + p;
      float* const sums = all_sums + p * rows * PANEL;
      if (from == 0) std::fill_n(sums, at_once * rows * PANEL, 0.0f);
      IntegerTile tile{};
      tile.numbers = numbers + from * planes;
      tile.block = from / block;
      tile.blocks = blocks;
      tile.panel = weight.panel(panel) + start;
      tile.chunks = chunks;
      tile.block_chunks = block / chunk;
      tile.sums_stride = rows * PANEL;
      tile.scales = GroupScales(weight, panel, weight.group ? from / weight.group : 0);
      tile.group_blocks = weight.group / block;
      const int64_t next_panel = (panel / both + 1) * both;
      const uint8_t* next = next_panel < first_panel + panels ? weight.panel(next_panel) + start
                            : last                            ? piece.after()
                                                              : weight.panel(first_panel) + start + bytes;
      const int64_t step = at_once * weight.chunk_bytes();
      if (at_once < both) next += panel % both * chunks * step;  // each of two panels fetches a half
      tile.rows = {quantized.first + piece.first_row * quantized.stride, quantized.stride};
      tile.sums = sums;
      const bool done = multiply_decoded(weight, tile, piece, next);
      for (int64_t t = 0; t < tiles && !done; ++t) {
        const int64_t row = piece.row(t), count = piece.row(t + 1) - row;
        tile.rows = {quantized.first + (piece.first_row + row) * quantized.stride, quantized.stride};
        tile.sums = sums + row * PANEL;
        tile.ahead = tiles == 1 && at_once < both
                         ? Ahead{next, step, false, nullptr, nullptr}
                         : piece.ahead(t, tile.panel, chunks * step, step, next, at_once * far);
        if (last && tiles > 1) fetch_results(linear, panel, piece.first_row + row, count);
        multiply_format(weight, tile, count, at_once);
      }
      if (last)
        for (int64_t i = 0; i < at_once; ++i)
          finish(linear, panel + i, piece.first_row, rows, sums + i * rows * PANEL);
    }
  }
}

#else

void run_integers(const Linear&, const QuantizedRows&, const Piece&, float*) {}

#endif

}  // namespace tgi
