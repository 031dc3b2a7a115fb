// Paged attention: what a step and a layer are.
#pragma once

#include "pool.h"
#include "simd.h"

namespace tgi {

// One step over a flat batch; tgi_cli/attention/base.py has the words.
struct Step {
  int64_t sequences;
  int64_t tokens;
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* kv_lens;      // [sequences], this step's tokens included
  const int32_t* block_table;  // [sequences, table_stride]
  int64_t table_stride;
  const int64_t* slots;  // [tokens]
  // [tokens]: the position of the last token of the bidirectional span that a token is in, -1 of tokens
  // in none; or null: there are no such spans.
  const int32_t* visible_until;
};

// The cache of a layer, in tiles of 16 tokens: a block of 16 n tokens is n tiles.
// Keys of a tile and head: [head_dim / 2][16 tokens][2], so that sixteen scores are one vector.
// Values: [8 token pairs][value_dim][2].
struct Cache {
  void* keys;    // [blocks][tiles of a block][kv_heads][head_dim * 16]
  // [blocks][tiles of a block][kv_heads][value_dim * 16], or null: values are the first dimensions of
  // the keys (latent attention).
  void* values;
  int64_t block_size;
  int64_t block_stride;  // bytes from a block to the next: other layers' may stand in between
  int64_t kv_heads;
  int64_t head_dim;   // of keys
  int64_t value_dim;  // of values
  int32_t dtype;  // 0: bf16, 1: e4m3, 2: e5m2
};

// What of a bidirectional span its tokens see: nothing behind them, its rest as far as the window
// allows, or all of it.
enum Spans : int64_t { NO_SPANS = 0, WINDOWED_SPANS = 1, WHOLE_SPANS = 2 };

struct Attention {
  const bf16* query;  // [tokens, heads, head_dim]
  int64_t query_stride;  // between tokens, in elements
  bf16* output;  // [tokens, heads * value_dim]
  int64_t output_stride;
  int64_t heads;
  Cache cache;
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // [heads], or null
  int64_t window;      // 0: none
  int64_t chunk;       // 0: none
  int64_t spans;       // see Spans
  // [heads, distances], or null: added to the scores of keys so far behind the query, from the
  // farthest to 0; beyond, the line through the first two goes on.
  const float* bias;
  int64_t distances;
};

// What the work of a step depends on: layers alike in it share a plan.
struct Shape {
  int64_t heads, kv_heads, head_dim, value_dim;
  int64_t window, chunk;  // 0: none
  int64_t spans;          // see Spans

  bool operator==(const Shape& other) const {
    return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
           value_dim == other.value_dim && window == other.window && chunk == other.chunk && spans == other.spans;
  }
};

}  // namespace tgi
