#include "scan.h"

#include <memory>

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Channels of a ticket. Of a prompt, 64 states of 16 numbers are 4 KiB, which stay in the first level
// of the cache while the tokens pass; decodes read each state once.
int64_t at_once(const StateStep& step) { return step.tokens <= 2 * step.sequences ? 256 : 64; }

// Room for the states of a ticket: of a sequence that begins (zeros), or that keeps none.
float* room(int64_t size, int which) {
  static thread_local std::unique_ptr<float[]> rooms[2];
  static thread_local int64_t there[2] = {};
  if (size > there[which]) {
    rooms[which].reset(new float[size_t(size)]);
    there[which] = size;
  }
  return rooms[which].get();
}

// A ticket: channels [begin, end) of a sequence. States are those of `begin` on.
struct Piece {
  const Scan& s;
  int64_t begin, end;

  int64_t numbers() const { return (end - begin) * s.size; }
  float* state(int64_t slot) const { return slot < 0 ? nullptr : s.states + (slot * s.channels + begin) * s.size; }

  // Tokens [first, last), from a state to where it goes, which may be the same.
  void tokens(int64_t first, int64_t last, const float* from, float* to) const {
    if (first == last && from != to) std::memcpy(to, from, size_t(numbers()) * sizeof(float));
    for (int64_t token = first; token < last; ++token, from = to) {
      const float *x = s.x + token * s.channels, *steps = s.steps + token * s.channels;
      const float *b = s.b + token * s.size, *c = s.c + token * s.size;
      float* const output = s.output + token * s.channels;
      for (int64_t channel = begin; channel < end; ++channel) {
        const float *a = s.a + channel * s.size, *old = from + (channel - begin) * s.size;
        float* const next = to + (channel - begin) * s.size;
        const f32x16 step = splat(steps[channel]), added = splat(steps[channel] * x[channel]);
        f32x16 read{};
        in_vectors(0, s.size, [&](int64_t at, int64_t left) __attribute__((always_inline)) {
          const f32x16 decay = exponential(step * load_part(a + at, left));
          const f32x16 state = fused(decay, load_part(old + at, left), added * load_part(b + at, left));
          store_part(next + at, state, left);
          read = fused(state, load_part(c + at, left), read);
        });
        output[channel] = sum_of(read);
      }
    }
  }
};

}  // namespace

int64_t scan_tickets(const Scan& scan, const StateStep& step) {
  const int64_t size = at_once(step);
  return step.sequences * ((scan.channels + size - 1) / size);
}

void scan_run(const Scan& scan, const StateStep& step, int64_t ticket) {
  const int64_t size = at_once(step), parts = (scan.channels + size - 1) / size;
  const int64_t sequence = step.sequences - 1 - ticket / parts;  // prompts, behind the decodes, first
  const int64_t begin = ticket % parts * size;
  const Piece piece{scan, begin, std::min(scan.channels, begin + size)};
  const float* from = piece.state(step.slots_in[sequence]);
  float* to = piece.state(step.slots_out[sequence]);
  if (!from) {
    float* const zeros = room(piece.numbers(), 0);
    std::memset(zeros, 0, size_t(piece.numbers()) * sizeof(float));
    from = zeros;
  }
  int64_t first = step.query_start[sequence];
  if (const int64_t after = step.snapshot(sequence); after >= 0) {
    float* const snapshot = piece.state(step.snapshot_slots[sequence]);
    piece.tokens(first, first + after, from, snapshot);
    first += after;
    from = snapshot;
  }
  const int64_t last = step.query_start[sequence + 1];
  if (first == last && !to) return;
  piece.tokens(first, last, from, to ? to : room(piece.numbers(), 1));
}

}  // namespace tgi

// A step's tokens through one layer's states.
TGI_EXPORT void tgi_scan(const tgi::Scan* scan, const tgi::StateStep* step, int threads) {
  tgi::share_out(threads, tgi::scan_tickets(*scan, *step),
                 [&](int64_t ticket, int) { tgi::scan_run(*scan, *step, ticket); });
}
