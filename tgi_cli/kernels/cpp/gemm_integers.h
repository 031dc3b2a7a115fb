// Products with codes of integers that are not converted to bfloat16.
#pragma once

#include "pieces.h"
#include "quantized_rows.h"

namespace tgi {

// Compute a piece from quantized rows. `sums` is memory for [MAX_PANELS][MAX_ROWS][PANEL].
void run_integers(const Linear& linear, const QuantizedRows& quantized, const Piece& piece, float* sums);

}  // namespace tgi
