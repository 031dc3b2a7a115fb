// Products of heads with a small matrix each.
#pragma once

#include "matrix.h"

namespace tgi {

// Each head's numbers, so many apart in x and in y, times a matrix of its own.
struct Heads {
  Linear first;  // of the first head; the other heads' matrices, in bfloat16, stand behind its
  int64_t heads;
  int64_t in, out;  // between heads
};

int64_t heads_tickets(const Heads& heads);
void heads_run(const Heads& heads, int64_t ticket);

}  // namespace tgi
