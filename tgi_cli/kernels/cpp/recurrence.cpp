#include "recurrence.h"

#include <memory>
#include <type_traits>

#include "vector8.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))
// A loop that is not left in the code: what it runs over are registers.
#define TGI_EACH(index, count) _Pragma("GCC unroll 16") for (int index = 0; index < count; ++index)

namespace tgi {
namespace {

#if defined(__AVX512F__)
using Columns = f32x16;
constexpr int TILE_VECTORS = 2;
constexpr int MOST_VECTORS = 8;
#else
using Columns = f32x8;
constexpr int TILE_VECTORS = 4;
constexpr int MOST_VECTORS = 4;
#endif
constexpr int64_t LANES = sizeof(Columns) / 4;
// Columns that go through a run of tokens together: with 128 rows 16 KiB, half of the first level of
// the cache; more columns would not leave room for the keys and queries.
constexpr int64_t TILE = TILE_VECTORS * LANES;
constexpr int64_t WIDE_TILE = MOST_VECTORS * LANES;
constexpr int64_t AT_ONCE = 16;  // tokens whose queries, keys and decays are made ready at a time

TGI_INLINE Columns columns_at(const float* from) {
  Columns columns;
  std::memcpy(&columns, from, sizeof(columns));
  return columns;
}

TGI_INLINE void put(float* to, Columns columns) { std::memcpy(to, &columns, sizeof(columns)); }

TGI_INLINE Columns all(float value) {
#if defined(__AVX512F__)
  return (Columns)_mm512_set1_ps(value);  // out of memory at once; adding it to 0 takes two more
#elif defined(__AVX2__)
  return (Columns)_mm256_set1_ps(value);
#else
  return Columns{} + value;
#endif
}

// What a few tokens of a head bring, ready to be used.
struct Ready {
  alignas(64) float query[AT_ONCE][MAX_KEY_DIM];
  alignas(64) float key[AT_ONCE][MAX_KEY_DIM];
  alignas(64) float decayed_key[AT_ONCE][MAX_KEY_DIM];  // of channels: decay times key
  alignas(64) float decays[AT_ONCE][MAX_KEY_DIM];       // of channels
  alignas(64) float decay[AT_ONCE];
  alignas(64) float gain[AT_ONCE];  // beta, or the step
};

struct Scratch {
  Ready ready;
  alignas(64) float tile[MAX_KEY_DIM * TILE];
};
thread_local Scratch scratch;

template <class T>
f32x16 gather(const void* from, int64_t stride, int64_t count) {
  alignas(64) float lanes[16] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(static_cast<const T*>(from)[i * stride]);
  return load(lanes);
}

f32x16 gather(const void* from, int64_t at, int64_t stride, int64_t count, bool wide) {
  if (wide) return gather<float>(static_cast<const float*>(from) + at, stride, count);
  return gather<bf16>(static_cast<const bf16*>(from) + at, stride, count);
}

f32x16 numbers_at(const void* from, int64_t at, int64_t count, bool wide) {
  if (wide) return load_part(static_cast<const float*>(from) + at, count);
  return load_part(static_cast<const bf16*>(from) + at, count);
}

// The decay of numbers a, and the step of those that have one.
__attribute__((noinline)) f32x16 decay_of(const Recurrence& r, f32x16 a, f32x16 bias, float rate, f32x16& step) {
  if (r.form == GIVEN) return exponential(a);
  a = a + bias;
  if (r.form == SIGMOID) return exponential(r.floor * sigmoid(rate * a));
  step = minimum(splat(r.ceiling), maximum(splat(r.floor), softplus(a)));
  return exponential(-rate * step);
}

// A row's numbers times `factor`, or that over their L2 norm (the root of their squares plus eps).
void scaled(const void* from, int64_t at, bool wide, int64_t dims, float eps, float factor, float* to) {
  if (eps >= 0) {
    f32x16 squares = {};
    for (int64_t d = 0; d < dims; d += 16) {
      const f32x16 x = numbers_at(from, at + d, dims - d, wide);
      squares = fused(x, x, squares);
    }
    factor = factor / std::sqrt(sum_of(squares) + eps);
  }
  for (int64_t d = 0; d < dims; d += 16) store(to + d, numbers_at(from, at + d, dims - d, wide) * factor);
}

// Tokens [first, first + count) of a head.
void make_ready(const Recurrence& r, int64_t head, int64_t first, int64_t count, Ready& ready) {
  const int64_t dims = r.key_dim, key_head = head / (r.heads / r.key_heads);
  const bool wide = r.wide, wide_gates = r.wide_gates;
  f32x16 step = splat(1.0f);
  if (!r.channels) {
    const f32x16 a = gather(r.decay, first * r.decay_stride + head, r.decay_stride, count, wide_gates);
    store(ready.decay, decay_of(r, a, splat(r.bias ? r.bias[head] : 0.0f), r.rate ? r.rate[head] : 0.0f, step));
  }
  if (r.delta) {
    step = gather(r.beta, first * r.beta_stride + head, r.beta_stride, count, wide_gates);
    if (r.form != GIVEN) step = r.beta_factor * sigmoid(step);
  }
  store(ready.gain, step);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i;
    scaled(r.query, token * r.query_stride + key_head * dims, wide, dims, r.norm_eps, r.scale, ready.query[i]);
    scaled(r.key, token * r.key_stride + key_head * dims, wide, dims, r.norm_eps, 1.0f, ready.key[i]);
    if (!r.channels) continue;
    for (int64_t d = 0; d < dims; d += 16) {
      const int64_t left = dims - d;
      const f32x16 a = numbers_at(r.decay, token * r.decay_stride + head * dims + d, left, wide_gates);
      const f32x16 bias = r.bias ? load_part(r.bias + head * dims + d, left) : f32x16{};
      const f32x16 decay = decay_of(r, a, bias, r.rate ? r.rate[head] : 0.0f, step);
      store(ready.decays[i] + d, decay);
      store(ready.decayed_key[i] + d, decay * load(ready.key[i] + d));
    }
  }
}

// What the rows have at the key: sums of coefficient times row, in the order of the rows.
template <int V>
void recall(const float* state, int64_t stride, int64_t rows, const float* coefficients, Columns* sums) {
  Columns found[V];
  TGI_EACH(v, V) found[v] = Columns{};
  for (int64_t row = 0; row < rows; ++row, state += stride) {
    const Columns coefficient = all(coefficients[row]);
    TGI_EACH(v, V) found[v] = fused(coefficient, columns_at(state + v * LANES), found[v]);
  }
  TGI_EACH(v, V) sums[v] = found[v];
}

// One token: the state's rows from -> to, the output, and what the next token's key finds there.
template <int V, bool CHANNELS, bool NEXT>
void advance(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
             const float* decays, const float* key, const float* query, const float* next_key,
             const Columns* change, Columns* output, Columns* next) {
  Columns added[V], out[V], found[V];
  TGI_EACH(v, V) {
    added[v] = change[v];
    out[v] = found[v] = Columns{};
  }
  Columns decay = all(decays[0]);
  for (int64_t row = 0; row < rows; ++row, from += from_stride, to += to_stride) {
    if (CHANNELS) decay = all(decays[row]);
    const Columns k = all(key[row]), q = all(query[row]);
    const Columns k_next = NEXT ? all(next_key[row]) : Columns{};
    TGI_EACH(v, V) {
      const Columns state = fused(k, added[v], decay * columns_at(from + v * LANES));
      put(to + v * LANES, state);
      out[v] = fused(q, state, out[v]);
      if (NEXT) found[v] = fused(k_next, state, found[v]);
    }
  }
  TGI_EACH(v, V) {
    output[v] = out[v];
    next[v] = found[v];
  }
}

template <class T>
TGI_INLINE Columns value_at(const T* from, int64_t count) {
  if (count >= LANES) {
#if defined(__AVX512F__)
    return load(from);
#else
    alignas(32) float lanes[LANES];
    for (int64_t i = 0; i < LANES; ++i) lanes[i] = to_float(from[i]);
    return columns_at(lanes);
#endif
  }
  alignas(64) float lanes[LANES] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
  return columns_at(lanes);
}

TGI_INLINE void set(float& to, float value) { to = value; }
TGI_INLINE void set(bf16& to, float value) { to = to_bf16(value); }

template <class T>
TGI_INLINE void put_value(T* to, Columns columns, int64_t count) {
#if defined(__AVX512F__)
  if (count >= LANES) return store(to, columns);
#endif
  alignas(64) float lanes[LANES];
  put(lanes, columns);
  for (int64_t i = 0; i < std::min(count, LANES); ++i) set(to[i], lanes[i]);
}

// `count` tokens that are ready, of V vectors of columns of a head, `columns` of them there.
template <class T, int V, bool CHANNELS>
void run_tokens(const Recurrence& r, const Ready& ready, int64_t head, int64_t column, int64_t columns, int64_t first,
                int64_t count, const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  const T* value = static_cast<const T*>(r.value) + first * r.value_stride + head * r.value_dim + column;
  T* output = static_cast<T*>(r.output) + first * r.output_stride + head * r.value_dim + column;
  const Columns skip = all(r.skip ? r.skip[head] : 0.0f);
  Columns change[V], out[V], found[V];
  auto coefficients = [&](int64_t i) { return CHANNELS ? ready.decayed_key[i] : ready.key[i]; };
  if (r.delta) recall<V>(from, from_stride, r.key_dim, coefficients(0), found);
  for (int64_t i = 0; i < count; ++i, value += r.value_stride, output += r.output_stride) {
    const Columns gain = all(ready.gain[i]), decay = all(CHANNELS ? -1.0f : -ready.decay[i]);
    TGI_EACH(v, V) {
      change[v] = value_at(value + v * LANES, columns - v * LANES);
      if (r.delta) change[v] = fused(decay, found[v], change[v]);
      change[v] = gain * change[v];
    }
    const float* decays = CHANNELS ? ready.decays[i] : ready.decay + i;
    if (r.delta && i + 1 < count)
      advance<V, CHANNELS, true>(from, from_stride, to, to_stride, r.key_dim, decays, ready.key[i], ready.query[i],
                                 coefficients(i + 1), change, out, found);
    else
      advance<V, CHANNELS, false>(from, from_stride, to, to_stride, r.key_dim, decays, ready.key[i], ready.query[i],
                                  nullptr, change, out, found);
    TGI_EACH(v, V) {
      if (r.skip) out[v] = fused(skip, value_at(value + v * LANES, columns - v * LANES), out[v]);
      put_value(output + v * LANES, out[v], columns - v * LANES);
    }
    from = to;
    from_stride = to_stride;
  }
}

template <class T, int V>
void run_tokens(const Recurrence& r, const Ready& ready, int64_t head, int64_t column, int64_t columns, int64_t first,
                int64_t count, const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  if (r.channels)
    run_tokens<T, V, true>(r, ready, head, column, columns, first, count, from, from_stride, to, to_stride);
  else
    run_tokens<T, V, false>(r, ready, head, column, columns, first, count, from, from_stride, to, to_stride);
}

// Rows of `columns` numbers; none are there where there is no `from`.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, to += to_stride) {
    if (!from)
      std::memset(to, 0, size_t(columns) * sizeof(float));
    else
      std::memcpy(to, from + row * from_stride, size_t(columns) * sizeof(float));
  }
}

// The working state of a sequence that keeps none.
float* unkept(int64_t size) {
  static thread_local std::unique_ptr<float[]> room;
  static thread_local int64_t there = 0;
  if (size > there) {
    room.reset(new float[size_t(size)]);
    there = size;
  }
  return room.get();
}

// A ticket: columns [begin, end) of a head of a sequence.
template <class T>
struct Piece {
  const Recurrence& r;
  int64_t head, begin, end;

  float* state(int64_t slot) const {
    return slot < 0 ? nullptr : r.states + (slot * r.heads + head) * r.key_dim * r.value_dim;
  }

  // A token reads the state where it was and writes it where it goes: one pass over memory, and
  // 4.1 us of 128x128 numbers that no cache has.
  void one_token(int64_t token, const float* from, float* to) const {
    const int64_t stride = r.value_dim;
    make_ready(r, head, token, 1, scratch.ready);
    auto run = [&](int64_t column, auto vectors) {
      constexpr int V = decltype(vectors)::value;
      run_tokens<T, V>(r, scratch.ready, head, column, V * LANES, token, 1, from + column, stride, to + column, stride);
    };
    int64_t column = begin;
    for (; column + WIDE_TILE <= end; column += WIDE_TILE) run(column, std::integral_constant<int, MOST_VECTORS>());
    for (; column + TILE <= end; column += TILE) run(column, std::integral_constant<int, TILE_VECTORS>());
    for (; column + LANES <= end; column += LANES) run(column, std::integral_constant<int, 1>());
  }

  // Some tokens, tile by tile, each of which is in the first level of the cache meanwhile.
  void some_tokens(int64_t first, int64_t count, const float* from, float* to) const {
    const int64_t stride = r.value_dim;
    float* const tile = scratch.tile;
    make_ready(r, head, first, count, scratch.ready);
    auto run = [&](int64_t column, auto vectors) {
      constexpr int V = decltype(vectors)::value;
      constexpr int64_t WIDTH = V * LANES;
      const int64_t columns = std::min(WIDTH, end - column);
      if (columns < WIDTH) std::memset(tile, 0, size_t(r.key_dim * WIDTH) * sizeof(float));
      copy_rows(from ? from + column : nullptr, stride, tile, WIDTH, r.key_dim, columns);
      run_tokens<T, V>(r, scratch.ready, head, column, columns, first, count, tile, WIDTH, tile, WIDTH);
      copy_rows(tile, WIDTH, to + column, stride, r.key_dim, columns);
    };
    int64_t column = begin;
    for (; column + TILE <= end; column += TILE) run(column, std::integral_constant<int, TILE_VECTORS>());
    for (; column < end; column += LANES) run(column, std::integral_constant<int, 1>());
  }

  // Tokens [first, last), from a state (null: a fresh one) to where it goes.
  void tokens(int64_t first, int64_t last, const float* from, float* to) const {
    if (first == last && from != to)
      copy_rows(from ? from + begin : nullptr, r.value_dim, to + begin, r.value_dim, r.key_dim, end - begin);
    if (last - first == 1 && from && (end - begin) % LANES == 0) return one_token(first, from, to);
    for (; first < last; first += AT_ONCE, from = to) some_tokens(first, std::min(AT_ONCE, last - first), from, to);
  }
};

template <class T>
void run_sequence(const Recurrence& r, const StateStep& step, int64_t sequence, int64_t head, int64_t begin,
                  int64_t end) {
  const Piece<T> piece{r, head, begin, end};
  const float* from = piece.state(step.slots_in[sequence]);
  float* to = piece.state(step.slots_out[sequence]);
  int64_t first = step.query_start[sequence];
  const int64_t last = step.query_start[sequence + 1];
  if (const int64_t after = step.snapshot(sequence); after >= 0) {
    float* const snapshot = piece.state(step.snapshot_slots[sequence]);
    piece.tokens(first, first + after, from, snapshot);
    first += after;
    from = snapshot;
  }
  if (first == last && !to) return;
  piece.tokens(first, last, from, to ? to : unkept(r.key_dim * r.value_dim));
}

int64_t parts_of(const Recurrence& r, const StateStep& step, int threads) {
  const int64_t tiles = (r.value_dim + TILE - 1) / TILE, heads = step.sequences * r.heads;
  int64_t parts = 1;
  while (threads > 1 && heads * parts < 4 * threads && parts < tiles) parts *= 2;
  return std::min(parts, tiles);
}

}  // namespace

int64_t recurrence_tickets(const Recurrence& recurrence, const StateStep& step, int threads) {
  return step.sequences * recurrence.heads * parts_of(recurrence, step, threads);
}

void recurrence_run(const Recurrence& r, const StateStep& step, int threads, int64_t ticket) {
  const int64_t parts = parts_of(r, step, threads), part = ticket % parts;
  const int64_t tiles = (r.value_dim + TILE - 1) / TILE;
  const int64_t head = ticket / parts % r.heads;
  // Prompts stand behind the decodes: longest first.
  const int64_t sequence = step.sequences - 1 - ticket / parts / r.heads;
  const int64_t begin = tiles * part / parts * TILE;
  const int64_t end = std::min(r.value_dim, tiles * (part + 1) / parts * TILE);
  if (r.wide)
    run_sequence<float>(r, step, sequence, head, begin, end);
  else
    run_sequence<bf16>(r, step, sequence, head, begin, end);
}

}  // namespace tgi

// A step's tokens through one layer's states.
TGI_EXPORT void tgi_recurrence(const tgi::Recurrence* recurrence, const tgi::StateStep* step, int threads) {
  tgi::share_out(threads, tgi::recurrence_tickets(*recurrence, *step, threads), [&](int64_t ticket, int) {
    tgi::recurrence_run(*recurrence, *step, threads, ticket);
  });
}
