// The operations of a program that are done token by token.
#pragma once

#include "program_buffers.h"

namespace tgi {

// Do one, of such a kind, for tokens [first, last).
void run_rows(const Buffers& buffers, const Op& op, const Run& run, int64_t first, int64_t last);

}  // namespace tgi
