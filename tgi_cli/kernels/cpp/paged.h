// Paged attention over tiles of 16 tokens, on a CPU.
//
// Keys are taken in chunks of 512, counted from the beginning of the sequence. The scores of a
// chunk, the softmax over them and their product with the values are computed on their own; then
// chunks are merged in their order, in float32, each by its largest score (after
// https://arxiv.org/abs/2205.14135). What is added up for a query is so a matter of its position
// alone: its result is the same to the last bit, whatever shares its step, its tile or its thread.
// Keys that a query does not see add exact zeros, where they share a tile with some that it sees.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"

namespace tgi {

// A piece of the work: rows of a sequence's queries (row: token * group + head in its group, where
// a group is the query heads of a KV head), with some KV heads, over some chunks of keys.
struct AttentionItem {
  int32_t sequence;
  int32_t head;  // KV heads
  int32_t heads;
  int32_t row;
  int32_t rows;
  int32_t chunk;
  int32_t chunks;
  int64_t partial;  // where its chunks' results go, in floats; -1: it has all the chunks there are
};

// What the items of a step and a window are. Made anew for each step, in the same memory.
struct AttentionPlan {
  Shape shape = {};
  int64_t group = 0;
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> merges;  // an item each, as if it had not been split
  std::unique_ptr<float[]> partials;
  int64_t room = 0;
};

void plan_attention(const Step& step, const Shape& shape, AttentionPlan& plan);

// First these tickets, in any order and on any thread; then, after all of them, the merge's.
inline int64_t attention_tickets(const AttentionPlan& plan) { return int64_t(plan.items.size()); }
void attention_run(const Attention& attention, const Step& step, const AttentionPlan& plan, int64_t ticket,
                   int thread);

// Long contexts of few queries are split among items; 0 tickets where none is.
inline int64_t attention_merge_tickets(const AttentionPlan& plan) { return int64_t(plan.merges.size()); }
void attention_merge_run(const Attention& attention, const Step& step, const AttentionPlan& plan, int64_t ticket,
                         int thread);

// Keys or values of tokens, [heads, dim] each, so many elements apart.
struct TokenRows {
  const bf16* first;
  int64_t stride;
};

// Put tokens' keys [kv_heads, head_dim] and values [kv_heads, value_dim] into their slots. Safe beside the same
// for other slots.
void store_kv(const Cache& cache, const int64_t* slots, int64_t tokens, const TokenRows& keys, const TokenRows& values);

}  // namespace tgi
