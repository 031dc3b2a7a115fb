// y = x W^T for packed weights, in pieces that threads take as they come to them.
//
// An element's sum runs over the inputs in one order, whatever the number of rows, the piece and
// the thread: so what a token gets does not depend, to the last bit, on the tokens beside it.
#pragma once

#include "quantized_rows.h"

namespace tgi {

// How many pieces a product has; how they are cut does not depend on the number of threads.
int64_t linear_tickets(const Linear& linear);

// Compute one piece. `quantized` has the rows unless quantized_stride() is 0.
void linear_run(const Linear& linear, const QuantizedRows& quantized, int64_t ticket);

}  // namespace tgi
