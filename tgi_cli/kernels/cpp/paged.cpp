#include "paged.h"

#include <algorithm>
#include <cstdlib>

#include "fp8.h"
#include "paged_rows.h"
#include "paged_tiles.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Which queries of a step a sequence's rows are, and which keys they see.
struct Rows {
  int64_t group;
  int64_t window;
  int64_t chunk;
  int64_t earlier;       // position of the first query
  const int32_t* until;  // of the queries, see Step; or null
  bool whole;            // a query in a span sees all of it

  Rows(const Step& step, const Shape& shape, int64_t sequence)
      : group(shape.heads / shape.kv_heads),
        window(shape.window),
        chunk(shape.chunk),
        earlier(step.kv_lens[sequence] - (step.query_start[sequence + 1] - step.query_start[sequence])),
        until(shape.spans && step.visible_until ? step.visible_until + step.query_start[sequence] : nullptr),
        whole(shape.spans == WHOLE_SPANS) {}

  int64_t position(int64_t row) const { return earlier + row / group; }
  // Neither falls from row to row: spans do not overlap, and those that are seen whole come first.
  int64_t begin(int64_t row) const {
    if (until && whole && until[row / group] >= 0) return 0;
    if (chunk) return position(row) / chunk * chunk;
    return window ? std::max<int64_t>(0, position(row) - window + 1) : 0;
  }
  int64_t end(int64_t row) const {
    return std::max<int64_t>(position(row), until ? until[row / group] : -1) + 1;
  }
};

TGI_INLINE int64_t queries_of(const Step& step, int64_t sequence) {
  return step.query_start[sequence + 1] - step.query_start[sequence];
}

// Where `count` tiles of a sequence's keys, or values, are, from `first` on. (Of a cache in 8 bits, too.)
void locate(const Cache& cache, const int32_t* table, int64_t first, int64_t count, int64_t head, bool values,
            const bf16** tiles) {
  const int64_t per_block = cache.block_size / TILE;
  const int64_t size = (values ? cache.value_dim : cache.head_dim) * TILE * (cache.dtype ? 1 : 2);
  const void* from = values ? cache.values : cache.keys;
  int64_t column = first / per_block, inside = first % per_block;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = table[column] * cache.block_stride + (inside * cache.kv_heads + head) * size;
    tiles[i] = reinterpret_cast<const bf16*>(static_cast<const uint8_t*>(from) + at);
    if (++inside == per_block) {
      inside = 0;
      ++column;
    }
  }
}

// How many bytes into the keys, or values, the tile of a slot is.
TGI_INLINE int64_t tile_of(const Cache& cache, int64_t slot, int64_t dim) {
  const int64_t block = slot / cache.block_size, tile = slot % cache.block_size / TILE;
  return block * cache.block_stride + tile * cache.kv_heads * dim * TILE * (cache.dtype ? 1 : 2);
}

// What an item begins with, to have it fetched.
void first_keys(const Attention& a, const Step& step, const AttentionPlan& plan, const AttentionItem& item,
                const bf16** tiles) {
  if (!item.chunks) return;
  const Rows rows(step, plan.shape, item.sequence);
  const int64_t first = std::max(rows.begin(item.row), item.chunk * CHUNK) / TILE;
  const int64_t count = (rows.end(item.row + item.rows - 1) + TILE - 1) / TILE - first;
  const int32_t* table = step.block_table + item.sequence * step.table_stride;
  locate(a.cache, table, first, std::min(AHEAD, count), item.head, false, tiles);
}

void finish_rows(const Attention& a, const Step& step, const AttentionPlan& plan, const AttentionItem& item,
                 int64_t head, const float* states) {
  const int64_t dim = plan.shape.value_dim, group = plan.group;
  const int64_t first_token = step.query_start[item.sequence];
  int64_t token = item.row / group, member = item.row % group;
  for (int64_t row = 0; row < item.rows; ++row) {
    const int64_t query_head = head * group + member;
    bf16* output = a.output + (first_token + token) * a.output_stride + query_head * dim;
    finish(states + row * (dim + PAD), dim, a.sinks ? a.sinks + query_head : nullptr, output);
    if (++member == group) {
      member = 0;
      ++token;
    }
  }
}

}  // namespace

void plan_attention(const Step& step, const Shape& shape, AttentionPlan& plan) {
  constexpr int64_t SMALL = 32 << 10;  // products of numbers: about a microsecond
  constexpr int64_t ENOUGH = 64;       // so many items are enough to keep all threads busy
  const int64_t kv_heads = shape.kv_heads, dims = (shape.head_dim + shape.value_dim) / 2;
  const int64_t width = shape.value_dim + PAD, reach = shape.window ? shape.window : shape.chunk;
  plan.shape = shape;
  plan.group = shape.heads / kv_heads;
  plan.items.clear();
  plan.merges.clear();

  int64_t total = 0, whole = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    int64_t rows = queries_of(step, s) * plan.group;
    int64_t keys = step.kv_lens[s] - (queries_of(step, s) - 1) / 2;
    total += rows * (reach ? std::min(keys, reach + TILE) : keys);
    whole += (rows + BLOCK - 1) / BLOCK;
  }
  total *= kv_heads * dims;
  int64_t block = BLOCK;
  while (block > 2 * STRIP && whole * kv_heads * (BLOCK / block) < ENOUGH) block /= 2;

  int64_t used = 0;
  // Prompts stand behind the decodes, and their last queries see most: longest first.
  for (int64_t s = step.sequences - 1; s >= 0; --s) {
    const int64_t count = queries_of(step, s) * plan.group;
    const Rows rows(step, shape, s);
    for (int64_t row = count ? (count - 1) / block * block : -1; row >= 0; row -= block) {
      AttentionItem item;
      item.sequence = int32_t(s);
      item.row = int32_t(row);
      item.rows = int32_t(std::min(block, count - row));
      const int64_t begin = rows.begin(row), end = rows.end(row + item.rows - 1);
      item.chunk = int32_t(begin / CHUNK);
      item.chunks = int32_t((end + CHUNK - 1) / CHUNK - item.chunk);
      item.partial = -1;
      const int64_t cost = item.rows * (end - begin) * dims;
      const bool split = item.chunks > 1 && cost * (ENOUGH / 2) > total;
      item.heads = int32_t(split ? 1 : std::clamp<int64_t>(SMALL / std::max<int64_t>(cost, 1), 1, kv_heads));
      for (item.head = 0; item.head < kv_heads; item.head += item.heads) {
        item.heads = int32_t(std::min<int64_t>(item.heads, kv_heads - item.head));
        if (!split) {
          plan.items.push_back(item);
          continue;
        }
        const int64_t pieces = std::min<int64_t>(item.chunks, (cost * ENOUGH + total - 1) / total);
        AttentionItem piece = item;
        for (int64_t left = pieces; left > 0; --left) {
          piece.chunks = int32_t((item.chunk + item.chunks - piece.chunk + left - 1) / left);
          piece.partial = used + (piece.chunk - item.chunk) * item.rows * width;
          plan.items.push_back(piece);
          piece.chunk += piece.chunks;
        }
        AttentionItem merged = item;
        merged.partial = used;
        plan.merges.push_back(merged);
        used += item.chunks * item.rows * width;
      }
    }
  }
  if (used > plan.room) {
    plan.room = used + used / 2;
    plan.partials.reset(new float[size_t(plan.room)]);
  }
}

void attention_run(const Attention& a, const Step& step, const AttentionPlan& plan, int64_t ticket, int) {
  alignas(64) float scores[STRIP * SCORES];
  alignas(64) bf16 weights[STRIP * WEIGHTS];
  alignas(64) float products[STRIP * (MAX_DIM + PAD)];
  alignas(64) float states[BLOCK * (MAX_DIM + PAD)];
  alignas(64) bf16 copied[BLOCK * MAX_DIM];
  static thread_local Widened widened;
  static thread_local Turned turned;
  // Other threads take tickets in between: as many as they took before this one, probably.
  static thread_local int64_t last_ticket = 0;
  const int64_t next_ticket = ticket + std::clamp<int64_t>(ticket - last_ticket, 1, 64);
  last_ticket = ticket;
  const bf16* tiles[2 * CHUNK / TILE + AHEAD + 1];  // of keys, of values, and some of what comes next

  const AttentionItem& item = plan.items[size_t(ticket)];
  const int64_t dim = plan.shape.head_dim, value_dim = plan.shape.value_dim;
  const int64_t group = plan.group, width = value_dim + PAD;
  const int64_t first_token = step.query_start[item.sequence];
  const int32_t* table = step.block_table + item.sequence * step.table_stride;
  const Rows rows(step, plan.shape, item.sequence);
  const int64_t begin = rows.begin(item.row), end = rows.end(item.row + item.rows - 1);
  const float factor = a.softcap || a.bias ? LOG2_E : a.scale * LOG2_E;

  for (int64_t head = item.head; head < item.head + item.heads; ++head) {
    const int64_t token = item.row / group, member = item.row % group;
    const bf16* query = a.query + (first_token + token) * a.query_stride + (head * group + member) * dim;
    if (member + item.rows > group) {
      for (int64_t row = 0; row < item.rows; ++row) {
        const int64_t t = (item.row + row) / group, g = (item.row + row) % group;
        std::memcpy(copied + row * dim, a.query + (first_token + t) * a.query_stride + (head * group + g) * dim,
                    size_t(dim) * 2);
      }
      query = copied;
    }
    if (!item.chunks)
      for (int64_t row = 0; row < item.rows; ++row) states[row * width + value_dim] = NONE;
    float* places = item.partial < 0 ? states : plan.partials.get() + item.partial;
    for (int64_t chunk = item.chunk; chunk < item.chunk + item.chunks; ++chunk) {
      const int64_t base = chunk * CHUNK;
      const int64_t first_tile = std::max(begin, base) / TILE;
      const int64_t last_tile = (std::min(end, base + CHUNK) - 1) / TILE;
      const int64_t count = last_tile - first_tile + 1;
      locate(a.cache, table, first_tile, count, head, false, tiles);
      locate(a.cache, table, first_tile, count, head, a.cache.values != nullptr, tiles + count);
      const bf16** next = tiles + 2 * count;
      for (int64_t i = 0; i <= AHEAD; ++i) next[i] = next[-1];
      if (chunk + 1 < item.chunk + item.chunks) {
        const int64_t some = std::min(AHEAD, (end + TILE - 1) / TILE - last_tile - 1);
        locate(a.cache, table, last_tile + 1, some, head, false, next);
      } else if (head + 1 < item.head + item.heads) {
        const int64_t some = std::min(AHEAD, (end + TILE - 1) / TILE - begin / TILE);
        locate(a.cache, table, begin / TILE, some, head + 1, false, next);
      } else if (next_ticket < attention_tickets(plan)) {
        first_keys(a, step, plan, plan.items[size_t(next_ticket)], next);
      }
      if (a.cache.dtype) widened.widen_all(a.cache, tiles, count);
      if (!a.cache.values) turned.turn_all(a.cache, tiles, count);
      // Where the chunk's first key would be, had the list begun there.
      const bf16** keys = tiles + base / TILE - first_tile;
      const bf16** values = keys + count;
      const bool fresh = item.partial >= 0 || chunk == item.chunk;
      for (int64_t strip = 0; strip < item.rows; strip += STRIP) {
        const int64_t size = std::min(STRIP, item.rows - strip), row = item.row + strip;
        float* place = places + strip * width;
        float* target = fresh ? place : products;
        // In keys of the chunk: what any row of the strip sees, from its tile on.
        const int64_t from = std::max<int64_t>(0, rows.begin(row) - base) / TILE * TILE;
        const int64_t to = std::min(CHUNK, rows.end(row + size - 1) - base);
        if (from >= to) {
          if (fresh)
            for (int64_t r = 0; r < size; ++r) target[r * width + value_dim] = NONE;
          continue;
        }
        const int64_t vectors = (to - from + TILE - 1) / TILE;
        all_scores(query + strip * dim, size, dim, keys + from / TILE, vectors, scores);
        for (int64_t r = 0; r < size; ++r) {
          Bias bias = {nullptr, a.distances, rows.position(row + r) - base - from};
          if (a.bias) bias.table = a.bias + (head * group + (row + r) % group) * a.distances;
          softmax(scores + r * SCORES, weights + r * WEIGHTS, vectors, rows.begin(row + r) - base - from,
                  std::min(CHUNK, rows.end(row + r) - base) - from, factor, a.scale, a.softcap, bias,
                  target + r * width + value_dim);
        }
        all_values(weights, size, value_dim, values + from / TILE, to - from, target);
        if (!fresh)
          for (int64_t r = 0; r < size; ++r) merge(place + r * width, target + r * width, value_dim);
      }
      if (item.partial >= 0) places += item.rows * width;
    }
    if (item.partial < 0) finish_rows(a, step, plan, item, head, states);
  }
}

void attention_merge_run(const Attention& a, const Step& step, const AttentionPlan& plan, int64_t ticket, int) {
  const AttentionItem& item = plan.merges[size_t(ticket)];
  const int64_t dim = plan.shape.value_dim, width = dim + PAD;
  float* states = plan.partials.get() + item.partial;
  for (int64_t row = 0; row < item.rows; ++row)
    for (int64_t chunk = 1; chunk < item.chunks; ++chunk)
      merge(states + row * width, states + (chunk * item.rows + row) * width, dim);
  finish_rows(a, step, plan, item, item.head, states);
}

namespace {

void store_narrow(const Cache& cache, int64_t slot, int64_t head, const bf16* key, const bf16* value) {
  const int64_t dim = cache.head_dim, value_dim = cache.values ? cache.value_dim : 0, place = slot % TILE;
  const Float8 format = cache.dtype == 1 ? E4M3 : E5M2;
  uint8_t* keys = static_cast<uint8_t*>(cache.keys) + tile_of(cache, slot, dim) + head * dim * TILE;
  uint8_t* values = static_cast<uint8_t*>(cache.values) + tile_of(cache, slot, value_dim) + head * value_dim * TILE;
  for (int64_t d = 0; d < dim; d += 16) {
    const u8x16 codes = to_fp8(load(key + d), format);
    uint8_t pairs[16];
    std::memcpy(pairs, &codes, 16);
    uint8_t* token = keys + d * TILE + fp8_place(place * 2);
    for (int64_t i = 0; i < 16; i += 2) std::memcpy(token + fp8_place(i * 16), pairs + i, 2);
  }
  for (int64_t d = 0; d < value_dim; d += 16) {
    const u8x16 codes = to_fp8(load(value + d), format);
    uint8_t* token = values + fp8_place(place / 2 * value_dim * 2 + d * 2) + place % 2;
    for (int64_t i = 0; i < 16; ++i) token[fp8_place(i * 2)] = codes[i];
  }
}

void store_wide(const Cache& cache, int64_t slot, int64_t head, const bf16* key, const bf16* value) {
  const int64_t dim = cache.head_dim, value_dim = cache.values ? cache.value_dim : 0, place = slot % TILE;
  bf16* keys = reinterpret_cast<bf16*>(static_cast<uint8_t*>(cache.keys) + tile_of(cache, slot, dim)) +
               head * dim * TILE + place * 2;
  bf16* values = reinterpret_cast<bf16*>(static_cast<uint8_t*>(cache.values) + tile_of(cache, slot, value_dim)) +
                 head * value_dim * TILE + place / 2 * value_dim * 2;
  for (int64_t d = 0; d < dim; d += 2) std::memcpy(keys + d * TILE, key + d, 4);
#if defined(__AVX512BW__)
  const uint32_t mine = 0x55555555u << (place % 2), shift = uint32_t(place % 2 * 16);
  for (int64_t d = 0; d < value_dim; d += 16) {
    u16x16 half;
    std::memcpy(&half, value + d, 32);
    const u32x16 words = __builtin_convertvector(half, u32x16);
    // The other token of the pair may be written by another thread at this moment.
    _mm512_mask_storeu_epi16(values + d * 2, mine, (__m512i)(words << shift));
  }
#else
  for (int64_t d = 0; d < value_dim; ++d) values[d * 2 + place % 2] = value[d];
#endif
}

}  // namespace

void store_kv(const Cache& cache, const int64_t* slots, int64_t tokens, const TokenRows& keys,
              const TokenRows& values) {
  const int64_t dim = cache.head_dim, value_dim = cache.values ? cache.value_dim : 0;
  // Heads outside: neighbouring tokens write to the same lines, which do not stay in the first-level cache if
  // those of all heads are in between.
  for (int64_t head = 0; head < cache.kv_heads; ++head)
    for (int64_t token = 0; token < tokens; ++token) {
      const bf16* key = keys.first + token * keys.stride + head * dim;
      const bf16* value = values.first + token * values.stride + head * value_dim;
      if (cache.dtype)
        store_narrow(cache, slots[token], head, key, value);
      else
        store_wide(cache, slots[token], head, key, value);
    }
}

}  // namespace tgi

// A step's attention in one layer.
TGI_EXPORT void tgi_attention(const tgi::Attention* attention, const tgi::Step* step, int threads) {
  static thread_local tgi::AttentionPlan plan;
  const tgi::Cache& cache = attention->cache;
  tgi::plan_attention(*step,
                      {attention->heads, cache.kv_heads, cache.head_dim, cache.value_dim, attention->window,
                       attention->chunk, attention->spans},
                      plan);
  const tgi::AttentionPlan& made = plan;
  tgi::share_out(threads, tgi::attention_tickets(made), [&](int64_t ticket, int thread) {
    tgi::attention_run(*attention, *step, made, ticket, thread);
  });
  tgi::share_out(threads, tgi::attention_merge_tickets(made), [&](int64_t ticket, int thread) {
    tgi::attention_merge_run(*attention, *step, made, ticket, thread);
  });
}

// Keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim], so many elements apart from token to token.
TGI_EXPORT void tgi_store_kv(const tgi::Cache* cache, int64_t tokens, const int64_t* slots, const tgi::bf16* key,
                             int64_t key_stride, const tgi::bf16* value, int64_t value_stride, int threads) {
  constexpr int64_t AT_ONCE = 32;
  tgi::share_out(threads, (tokens + AT_ONCE - 1) / AT_ONCE, [&](int64_t ticket, int) {
    const int64_t first = ticket * AT_ONCE;
    tgi::store_kv(*cache, slots + first, std::min(tokens - first, AT_ONCE), {key + first * key_stride, key_stride},
                  {value + first * value_stride, value_stride});
  });
}
