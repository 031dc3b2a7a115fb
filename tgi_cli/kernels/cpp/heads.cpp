#include "heads.h"

#include <algorithm>
#include <vector>

#include "gemm.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Rows of a ticket of a prompt. A head's matrix is small: what takes time beside the product is to
// have the rows ready, which is done once for all of the head's outputs.
constexpr int64_t BLOCK = 48;
constexpr int64_t MARGIN = 32;  // keeps copied rows off each other's cache sets

Linear of_head(const Heads& heads, int64_t head) {
  Linear one = heads.first;
  one.x += head * heads.in;
  one.y = static_cast<bf16*>(one.y) + head * heads.out;
  one.weight += head;
  return one;
}

bool in_blocks(const Heads& heads) { return heads.first.rows > BLOCK; }

int64_t blocks_of(const Heads& heads) { return (heads.first.rows + BLOCK - 1) / BLOCK; }

}  // namespace

int64_t heads_tickets(const Heads& heads) {
  return heads.heads * (in_blocks(heads) ? blocks_of(heads) : linear_tickets(heads.first));
}

void heads_run(const Heads& heads, int64_t ticket) {
  if (!in_blocks(heads)) {
    const int64_t tickets = linear_tickets(heads.first);
    return linear_run(of_head(heads, ticket / tickets), {}, ticket % tickets);
  }
  static thread_local std::vector<bf16> copied;
  const int64_t blocks = blocks_of(heads), block = ticket % blocks;
  Linear one = of_head(heads, ticket / blocks);
  const int64_t begin = one.rows * block / blocks, end = one.rows * (block + 1) / blocks;
  one.x += begin * one.x_stride;
  one.y = static_cast<bf16*>(one.y) + begin * one.y_stride;
  one.rows = end - begin;
  if (one.x_stride % 1024 == 0) {
    const int64_t in = one.weight->in, stride = in + MARGIN;
    copied.resize(size_t(one.rows * stride));
    for (int64_t row = 0; row < one.rows; ++row)
      std::memcpy(copied.data() + row * stride, one.x + row * one.x_stride, size_t(in) * sizeof(bf16));
    one.x = copied.data();
    one.x_stride = stride;
  }
  for (int64_t piece = 0, pieces = linear_tickets(one); piece < pieces; ++piece) linear_run(one, {}, piece);
}

}  // namespace tgi

// Each head's numbers times a matrix of its own, `in` and `out` numbers apart.
TGI_EXPORT void tgi_heads(const tgi::Linear* linear, int64_t heads, int64_t in, int64_t out, int threads) {
  const tgi::Heads all{*linear, heads, in, out};
  tgi::share_out(threads, tgi::heads_tickets(all), [&](int64_t ticket, int) { tgi::heads_run(all, ticket); });
}
