#include "convolution.h"

#include "activation.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

TGI_INLINE f32x16 rounded(f32x16 x, const bf16*) { return through_bf16(x); }
TGI_INLINE f32x16 rounded(f32x16 x, const float*) { return x; }

// A ticket: channels [begin, end) of a sequence, whose tokens are [first, first + length).
template <class T>
struct Piece {
  const Convolution& c;
  int64_t first, length, begin, end;
  const T* old;  // the state before, or null

  T* state(int64_t slot) const {
    return slot < 0 ? nullptr : static_cast<T*>(c.states) + slot * (c.taps - 1) * c.channels;
  }

  TGI_INLINE f32x16 product(const T* x, const T* before, int64_t channel, int64_t left) const {
    if (!before) return load_part(x + channel, left);
    return rounded(load_part(x + channel, left) * load_part(before + channel, left), x);
  }

  // A row of inputs, the sequence's first being 0 and those of the state below.
  struct Row {
    const T* x;  // null: zeros
    const T* before;
  };

  Row row(int64_t token) const {
    if (token < 0) return {old ? old + (token + c.taps - 1) * c.channels : nullptr, nullptr};
    const T* x = static_cast<const T*>(c.x) + (first + token) * c.x_stride;
    return {x, c.before ? static_cast<const T*>(c.before) + (first + token) * c.before_stride : nullptr};
  }

  void compute(int64_t token) const {
    Row rows[MAX_TAPS];
    for (int64_t tap = 0; tap < c.taps; ++tap) rows[tap] = row(token - c.taps + 1 + tap);
    const T* after = c.after ? static_cast<const T*>(c.after) + (first + token) * c.after_stride : nullptr;
    T* output = static_cast<T*>(c.output) + (first + token) * c.output_stride;
    in_vectors(begin, end, [&](int64_t channel, int64_t left) __attribute__((always_inline)) {
      f32x16 sum = c.bias ? load_part(c.bias + channel, left) : f32x16{};
      for (int64_t tap = 0; tap < c.taps; ++tap) {
        if (!rows[tap].x) continue;
        const f32x16 weight = load_part(c.weight + tap * c.channels + channel, left);
        sum = fused(weight, product(rows[tap].x, rows[tap].before, channel, left), sum);
      }
      if (c.activation >= 0) sum = activate(sum, c.activation);
      if (after) sum = rounded(sum, output) * load_part(after + channel, left);
      store_part(output + channel, sum, left);
    });
  }

  // The last inputs of the first `count` tokens. The old state may be where they go.
  void keep(int64_t count, T* to) const {
    if (!to) return;
    for (int64_t tap = 0; tap + 1 < c.taps; ++tap, to += c.channels) {
      const Row from = row(count - c.taps + 1 + tap);
      in_vectors(begin, end, [&](int64_t channel, int64_t left) {
        store_part(to + channel, from.x ? product(from.x, from.before, channel, left) : f32x16{}, left);
      });
    }
  }
};

// Channels of a ticket: less than a microsecond's work for one token.
int64_t at_once(const StateStep& step) { return step.tokens <= 2 * step.sequences ? 1024 : 256; }

template <class T>
void run_piece(const Convolution& c, const StateStep& step, int64_t sequence, int64_t begin, int64_t end) {
  Piece<T> piece{c, step.query_start[sequence], step.length(sequence), begin, end, nullptr};
  piece.old = piece.state(step.slots_in[sequence]);
  for (int64_t token = 0; token < piece.length; ++token) piece.compute(token);
  if (const int64_t after = step.snapshot(sequence); after >= 0)
    piece.keep(after, piece.state(step.snapshot_slots[sequence]));
  piece.keep(piece.length, piece.state(step.slots_out[sequence]));
}

}  // namespace

int64_t convolution_tickets(const Convolution& convolution, const StateStep& step) {
  const int64_t size = at_once(step);
  return step.sequences * ((convolution.channels + size - 1) / size);
}

void convolution_run(const Convolution& convolution, const StateStep& step, int64_t ticket) {
  const int64_t size = at_once(step), parts = (convolution.channels + size - 1) / size;
  const int64_t sequence = step.sequences - 1 - ticket / parts;  // prompts, behind the decodes, first
  const int64_t begin = ticket % parts * size, end = std::min(convolution.channels, begin + size);
  if (convolution.wide)
    run_piece<float>(convolution, step, sequence, begin, end);
  else
    run_piece<bf16>(convolution, step, sequence, begin, end);
}

}  // namespace tgi

// A step's tokens through one layer's convolution.
TGI_EXPORT void tgi_convolution(const tgi::Convolution* convolution, const tgi::StateStep* step, int threads) {
  tgi::share_out(threads, tgi::convolution_tickets(*convolution, *step),
                 [&](int64_t ticket, int) { tgi::convolution_run(*convolution, *step, ticket); });
}
