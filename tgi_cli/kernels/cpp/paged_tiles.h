// Tiles of a chunk of keys that are not used as they are kept: in 8 bits, or as keys alone.
#pragma once

#include <cstdlib>

#include "fp8.h"
#include "paged_rows.h"

namespace tgi {
namespace {

// What is kept in 8 bits is widened for a chunk at a time, into memory of the thread's own.
class Widened {
 public:
  ~Widened() { std::free(room_); }

  // Put these tiles into the list, `count` of keys and as many of values, in place of what is in 8 bits.
  void widen_all(const Cache& cache, const bf16** tiles, int64_t count) {
    const int64_t dims = cache.head_dim + cache.value_dim;
    if (dims * TILE * count > size_) {
      std::free(room_);
      size_ = dims * CHUNK;
      room_ = static_cast<bf16*>(std::aligned_alloc(64, size_t(size_) * 2));
    }
    const Float8 format = cache.dtype == 1 ? E4M3 : E5M2;
    widen_some(tiles, count, cache.head_dim * TILE, format, room_);
    if (cache.values)
      widen_some(tiles + count, count, cache.value_dim * TILE, format, room_ + count * cache.head_dim * TILE);
  }

 private:
  static void widen_some(const bf16** tiles, int64_t count, int64_t size, Float8 format, bf16* room) {
    for (int64_t i = 0; i < count; ++i) {
      const auto* later = reinterpret_cast<const uint8_t*>(tiles[i + AHEAD]);
      for (int64_t line = 0; line < size; line += 64) prefetch(later + line);
      widen(reinterpret_cast<const uint8_t*>(tiles[i]), size, format, room + i * size);
      tiles[i] = room + i * size;
    }
  }

  bf16* room_ = nullptr;
  int64_t size_ = 0;
};

// A tile's leading dimensions in the order of values, where they are kept as keys alone: pairs of
// dimensions of a token become pairs of tokens. Of 512 dimensions a tile takes 0.4 us, and the
// products of 16 heads with it 2.6.
void turn(const bf16* keys, int64_t value_dim, bf16* values) {
  typedef uint64_t u64x4 __attribute__((vector_size(32)));
  for (int64_t d = 0; d < value_dim; d += 8)
    for (int half = 0; half < 2; ++half) {
      u64x4 rows[4];  // of two dimensions: four pairs of tokens
      for (int i = 0; i < 4; ++i) {
        u16x16 row;
        std::memcpy(&row, keys + (d / 2 + i) * 2 * TILE + half * 16, 32);
        rows[i] = (u64x4)__builtin_shuffle(row, u16x16{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
      }
      const u64x4 low[2] = {__builtin_shuffle(rows[0], rows[1], u64x4{0, 4, 2, 6}),
                            __builtin_shuffle(rows[2], rows[3], u64x4{0, 4, 2, 6})};
      const u64x4 high[2] = {__builtin_shuffle(rows[0], rows[1], u64x4{1, 5, 3, 7}),
                             __builtin_shuffle(rows[2], rows[3], u64x4{1, 5, 3, 7})};
      const u64x4 pairs[4] = {__builtin_shuffle(low[0], low[1], u64x4{0, 1, 4, 5}),
                              __builtin_shuffle(high[0], high[1], u64x4{0, 1, 4, 5}),
                              __builtin_shuffle(low[0], low[1], u64x4{2, 3, 6, 7}),
                              __builtin_shuffle(high[0], high[1], u64x4{2, 3, 6, 7})};
      for (int i = 0; i < 4; ++i) std::memcpy(values + ((half * 4 + i) * value_dim + d) * 2, pairs + i, 32);
    }
}

// Tiles of a chunk that were turned, in memory of the thread's own.
class Turned {
 public:
  ~Turned() { std::free(room_); }

  // Of `count` tiles of keys, those of values behind them in the list.
  void turn_all(const Cache& cache, const bf16** tiles, int64_t count) {
    if (cache.value_dim > dims_) {
      std::free(room_);
      dims_ = cache.value_dim;
      room_ = static_cast<bf16*>(std::aligned_alloc(64, size_t(dims_ * CHUNK) * 2));
    }
    for (int64_t i = 0; i < count; ++i) {
      bf16* values = room_ + i * cache.value_dim * TILE;
      turn(tiles[i], cache.value_dim, values);
      tiles[count + i] = values;
    }
  }

 private:
  bf16* room_ = nullptr;
  int64_t dims_ = 0;
};

}  // namespace
}  // namespace tgi
