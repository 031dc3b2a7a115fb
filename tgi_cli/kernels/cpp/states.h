// Recurrent states: which slots the sequences of a step read and write.
#pragma once

#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace tgi {

// tgi_cli/attention/states.py has the words. No slot that one sequence reads is written by another.
struct StateStep {
  int64_t sequences;
  int64_t tokens;
  const int32_t* query_start;     // [sequences + 1]
  const int64_t* slots_in;        // [sequences], -1: a fresh state of zeros
  const int64_t* slots_out;       // -1: the state is not kept
  const int64_t* snapshot_after;  // tokens before the snapshot
  const int64_t* snapshot_slots;  // -1: none

  int64_t length(int64_t sequence) const { return query_start[sequence + 1] - query_start[sequence]; }
  // After how many of its tokens a sequence's state is kept in the middle of the step; -1: never.
  int64_t snapshot(int64_t sequence) const {
    return snapshot_slots[sequence] < 0 ? -1 : snapshot_after[sequence];
  }
};

// Numbers come in bfloat16 or float32 and are computed with in float32. Behind the last of fewer
// than 16 the lanes are 0.
template <class T>
TGI_INLINE f32x16 load_part(const T* from, int64_t count) {
  if (count >= 16) return load(from);
  T some[16] = {};
  std::memcpy(some, from, size_t(count) * sizeof(T));
  return load(some);
}

template <class T>
TGI_INLINE void store_part(T* to, f32x16 x, int64_t count) {
  if (count >= 16) return store(to, x);
  T all[16];
  store(all, x);
  std::memcpy(to, all, size_t(count) * sizeof(T));
}

// take(first, count) for numbers [begin, end), 16 at a time; whole vectors are without branches.
template <class Take>
TGI_INLINE void in_vectors(int64_t begin, int64_t end, const Take& take) {
  for (; begin + 16 <= end; begin += 16) take(begin, 16);
  if (begin < end) take(begin, end - begin);
}

// ln(1 + e^x) to about 2 in 10^7.
TGI_INLINE f32x16 softplus(f32x16 x) {
  // ln(1 + u) = 2 artanh(u / (2 + u)), and u = e^-|x| is at most 1.
  f32x16 u = exponential(-(x < 0.0f ? -x : x));
  f32x16 s = u / (2.0f + u), square = s * s;
  f32x16 p = splat(2.0f / 15.0f);
  p = fused(p, square, splat(2.0f / 13.0f));
  p = fused(p, square, splat(2.0f / 11.0f));
  p = fused(p, square, splat(2.0f / 9.0f));
  p = fused(p, square, splat(2.0f / 7.0f));
  p = fused(p, square, splat(2.0f / 5.0f));
  p = fused(p, square, splat(2.0f / 3.0f));
  p = fused(p, square, splat(2.0f));
  return fused(p, s, x > 0.0f ? x : splat(0.0f));
}

}  // namespace tgi
