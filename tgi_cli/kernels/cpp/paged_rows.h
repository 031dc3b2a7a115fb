// Attention of some rows over a chunk of keys: scores, softmax, values; and how chunks are merged.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"
#include "vector8.h"

// A loop that is not left in the code: what it runs over are registers.
#define TGI_EACH(index, count) _Pragma("GCC unroll 16") for (int index = 0; index < count; ++index)

namespace tgi {
namespace {

constexpr int64_t TILE = 16;     // tokens
constexpr int64_t CHUNK = 512;   // keys
constexpr int64_t BLOCK = 96;    // rows of an item, at most
constexpr int64_t MAX_DIM = 576;
constexpr int64_t PAD = 16;      // floats behind a row's output: its largest score and its sum
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.4426950408889634f;

// A row of what is between: padded, so that rows do not fall on the same lines of the cache.
constexpr int64_t SCORES = CHUNK + 16;
constexpr int64_t WEIGHTS = CHUNK + 32;

// Sums are kept in registers: of M rows and N vectors each.
#if defined(__AVX512F__)
using Sum = f32x16;
using Pairs = u32x16;
constexpr int MOST_ROWS = 6;
constexpr int MOST_VECTORS = 8;
constexpr int REGISTERS = 24;
#else
using Sum = f32x8;
using Pairs = u32x8;
constexpr int MOST_ROWS = 3;
constexpr int MOST_VECTORS = 4;
constexpr int REGISTERS = 12;
#endif
constexpr int64_t LANES = sizeof(Sum) / 4;
constexpr int64_t PARTS = TILE / LANES;  // vectors that a tile's tokens are

TGI_INLINE Pairs pairs_at(const bf16* from) {
  Pairs pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}

TGI_INLINE Sum sums_at(const float* from) {
  Sum sum;
  std::memcpy(&sum, from, sizeof(sum));
  return sum;
}

TGI_INLINE void put(float* to, Sum sum) { std::memcpy(to, &sum, sizeof(sum)); }

TGI_INLINE void put_weights(bf16* to, Sum weights) {
#if defined(__AVX512F__)
  store(to, weights);
#else
  store_positive(to, weights);
#endif
}

constexpr int64_t STRIP = 2 * MOST_ROWS < 8 ? 8 : 2 * MOST_ROWS;  // rows that go through a chunk together

constexpr int vectors_for(int rows) { return std::min(MOST_VECTORS, REGISTERS / rows); }

// How many tiles ahead of where they are needed they are fetched: memory answers after the time that
// eight tiles take. A list of tiles has so many more behind those that it is of.
constexpr int64_t AHEAD = 8;

TGI_INLINE void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// M rows of queries times N vectors of keys, PARTS of a tile: [M][N * LANES] scores.
template <int M, int N>
void scores_of(const bf16* query, int64_t dim, const bf16* const* keys, float* scores) {
  // Tiles that come later are fetched one after the other: memory likes long runs.
  const bf16* const* later = keys + AHEAD;
  const bf16* line = *later;
  const bf16* line_end = line + dim * TILE;
  Sum sums[M][N];
  const bf16* vectors[N];
  TGI_EACH(n, N) vectors[n] = keys[n / PARTS] + n % PARTS * LANES * 2;
  TGI_EACH(m, M) TGI_EACH(n, N) sums[m][n] = Sum{};
  for (int64_t d = 0; d < dim; d += 2) {
    Pairs pairs[M];
    TGI_EACH(m, M) pairs[m] = Pairs{} + pair_at(query + m * dim + d);
    TGI_EACH(n, N) {
      const Pairs key = pairs_at(vectors[n] + d * TILE);
      TGI_EACH(m, M) sums[m][n] = dot2(sums[m][n], pairs[m], key);
      if (n % PARTS == 0) prefetch(line + n / PARTS * 32);
    }
    line += N / PARTS * 32;
    if (line >= line_end) {
      line = *++later;
      line_end = line + dim * TILE;
    }
  }
  TGI_EACH(m, M) TGI_EACH(n, N) put(scores + m * SCORES + n * LANES, sums[m][n]);
}

// M rows of weights times N vectors of `keys` tokens' values, in tiles.
template <int M, int N>
void values_of(const bf16* weights, int64_t dim, const bf16* const* values, int64_t column, int64_t keys,
               float* output) {
  Sum sums[M][N];
  TGI_EACH(m, M) TGI_EACH(n, N) sums[m][n] = Sum{};
  auto add = [&](const bf16* pairs, const bf16* row, const bf16* later, uint32_t seen) __attribute__((always_inline)) {
    Pairs weight[M];
    TGI_EACH(m, M) weight[m] = Pairs{} + pair_at(row + m * WEIGHTS);
    TGI_EACH(n, N) {
      const Pairs value = pairs_at(pairs + n * LANES * 2) & seen;
      TGI_EACH(m, M) sums[m][n] = dot2(sums[m][n], weight[m], value);
      if (n % PARTS == 0) prefetch(later + n * LANES * 2);
    }
  };
  const int64_t step = dim * 2;
  for (; keys >= TILE; keys -= TILE, weights += TILE, ++values) {
    const bf16* pairs = *values + column * 2;
    const bf16* later = values[AHEAD] + column * 2;
    for (int64_t pair = 0; pair < TILE / 2; ++pair)
      add(pairs + pair * step, weights + pair * 2, later + pair * step, ~0u);
  }
  if (keys) {
    // Behind the last key stands what was there before, perhaps a NaN: no weight makes that zero.
    const bf16* pairs = *values + column * 2;
    const bf16* later = values[AHEAD] + column * 2;
    for (; keys >= 2; keys -= 2, pairs += step, later += step, weights += 2) add(pairs, weights, later, ~0u);
    if (keys) add(pairs, weights, later, 0xffffu);
  }
  TGI_EACH(m, M) TGI_EACH(n, N) put(output + m * (dim + PAD) + n * LANES, sums[m][n]);
}

using Scores = void (*)(const bf16*, int64_t, const bf16* const*, float*);
using Values = void (*)(const bf16*, int64_t, const bf16* const*, int64_t, int64_t, float*);

struct Kernels {
  Scores scores[MOST_ROWS + 1][MOST_VECTORS + 1] = {};
  Values values[MOST_ROWS + 1][MOST_VECTORS + 1] = {};

  template <int M, int N>
  constexpr void fill() {
    if constexpr (N % PARTS == 0) scores[M][N] = scores_of<M, N>;
    values[M][N] = values_of<M, N>;
    if constexpr (N < vectors_for(M))
      fill<M, N + 1>();
    else if constexpr (M < MOST_ROWS)
      fill<M + 1, 1>();
  }
  constexpr Kernels() { fill<1, 1>(); }
};
constexpr Kernels kernels;

// take(begin, size) for pieces of nearly equal size, at most `most`.
template <class Take>
TGI_INLINE void in_pieces(int64_t begin, int64_t end, int64_t most, const Take& take) {
  for (int64_t left = (end - begin + most - 1) / most; left > 0; --left) {
    int64_t size = (end - begin + left - 1) / left;
    take(begin, size);
    begin += size;
  }
}

void all_scores(const bf16* query, int64_t rows, int64_t dim, const bf16* const* keys, int64_t tiles, float* scores) {
  // Keys outside: some tiles of them stay in the first level of the cache for all the rows.
  const int64_t most = vectors_for(int(std::min<int64_t>(rows, MOST_ROWS))) / PARTS;
  in_pieces(0, tiles, most, [&](int64_t tile, int64_t count) {
    in_pieces(0, rows, MOST_ROWS, [&](int64_t row, int64_t size) {
      kernels.scores[size][count * PARTS](query + row * dim, dim, keys + tile, scores + row * SCORES + tile * TILE);
    });
  });
}

void all_values(const bf16* weights, int64_t rows, int64_t dim, const bf16* const* values, int64_t keys,
                float* output) {
  in_pieces(0, rows, MOST_ROWS, [&](int64_t row, int64_t size) {
    in_pieces(0, dim / LANES, vectors_for(int(size)), [&](int64_t vector, int64_t count) {
      kernels.values[size][count](weights + row * WEIGHTS, dim, values, vector * LANES, keys,
                                  output + row * (dim + PAD) + vector * LANES);
    });
  });
}

// What depends on a key's distance from the query: Attention's bias, of one head.
struct Bias {
  const float* table;
  int64_t size;
  int64_t distance;  // of the first key; each later one is one less

  // scores = scale * scores + bias, of a tile of keys: the same for a key whatever else is computed.
  void add(float* scores, int64_t tile, float scale) const {
    const int64_t farthest = size - 1, first = distance - tile * TILE;
    if (first - (TILE - 1) >= farthest) {
      const f32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const f32x16 line = (splat(float(first - farthest)) - lanes) * splat(table[0] - table[1]) + splat(table[0]);
      store(scores, load(scores) * splat(scale) + line);
      return;
    }
    float biases[TILE];
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t d = std::max<int64_t>(first - i, 0);
      biases[i] = d <= farthest ? table[farthest - d] : float(d - farthest) * (table[0] - table[1]) + table[0];
    }
    store(scores, load(scores) * splat(scale) + load(biases));
  }
};

// A row's scores over the keys of `vectors` tiles to weights; it sees those of [begin, end).
// The largest score (times factor) and the sum of the weights go to `summary`.
__attribute__((noinline)) void softmax(float* scores, bf16* weights, int64_t vectors, int64_t begin, int64_t end,
                                       float factor, float scale, float softcap, const Bias& bias, float* summary) {
  begin = std::max<int64_t>(begin, 0);
  if (begin >= end) {
    std::memset(weights, 0, size_t(vectors * TILE) * 2);
    summary[0] = NONE;
    summary[1] = 0;
    return;
  }
  const int64_t first = begin / TILE, last = (end - 1) / TILE;
  if (softcap)
    for (int64_t v = first; v <= last; ++v)
      store(scores + v * TILE, softcap * hyperbolic_tangent(load(scores + v * TILE) * (scale / softcap)));
  if (bias.table)
    for (int64_t v = first; v <= last; ++v) bias.add(scores + v * TILE, v, softcap ? 1.0f : scale);
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  auto hide = [&](int64_t v) {
    i32x16 key = lanes + int32_t(v * TILE);
    i32x16 seen = (key >= int32_t(begin)) & (key < int32_t(end));
    store(scores + v * TILE, seen ? load(scores + v * TILE) : splat(NONE));
  };
  if (begin % TILE) hide(first);
  if (end % TILE) hide(last);

  const int64_t start = first * TILE, stop = (last + 1) * TILE;
  Sum even = Sum{} + NONE, odd = even;
  int64_t key = start;
  for (; key + LANES < stop; key += 2 * LANES) {
    even = maximum(even, sums_at(scores + key));
    odd = maximum(odd, sums_at(scores + key + LANES));
  }
  if (key < stop) even = maximum(even, sums_at(scores + key));
  // Were there nothing but -inf and NaN, it would look as if there were no keys.
  const float largest = std::max(maximum_of(maximum(even, odd)) * factor, std::numeric_limits<float>::lowest());

  std::memset(weights, 0, size_t(start) * 2);
  Sum sum = {};
  for (key = start; key < stop; key += LANES) {
    const Sum weight = power_of_two(fused(sums_at(scores + key), Sum{} + factor, Sum{} - largest));
    sum += weight;
    put_weights(weights + key, weight);
  }
  std::memset(weights + stop, 0, size_t(vectors * TILE - stop) * 2);
  summary[0] = largest;
  summary[1] = sum_of(sum);
}

// A row's state: its output so far, not yet divided, then its largest score and its sum.
// `later` is of the next chunk.
__attribute__((noinline)) void merge(float* state, const float* later, int64_t dim) {
  if (later[dim] == NONE) return;
  if (state[dim] == NONE) {
    std::memcpy(state, later, size_t(dim + PAD) * 4);
    return;
  }
  const float largest = state[dim] > later[dim] ? state[dim] : later[dim];
  const f32x16 kept = power_of_two(splat(state[dim] - largest));
  const f32x16 added = power_of_two(splat(later[dim] - largest));
  for (int64_t d = 0; d < dim; d += 16)
    store(state + d, fused(load(later + d), added, load(state + d) * kept));
  store(state + dim, fused(splat(later[dim + 1]), added, splat(state[dim + 1]) * kept));
  state[dim + 1] = state[dim];
  state[dim] = largest;
}

__attribute__((noinline)) void finish(const float* state, int64_t dim, const float* sink, bf16* output) {
  if (state[dim] == NONE) {
    for (int64_t d = 0; d < dim; d += 16) store(output + d, f32x16{});
    return;
  }
  float sum = state[dim + 1];
  f32x16 kept = splat(1.0f);
  if (sink) {
    const float logit = *sink * LOG2_E;
    const float largest = state[dim] > logit ? state[dim] : logit;
    kept = power_of_two(splat(state[dim] - largest));
    float sums[16];
    store(sums, splat(sum) * kept + power_of_two(splat(logit - largest)));
    sum = sums[0];
  }
  const f32x16 factor = kept / sum;
  for (int64_t d = 0; d < dim; d += 16) store(output + d, load(state + d) * factor);
}

}  // namespace
}  // namespace tgi
