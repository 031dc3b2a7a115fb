// Work shared out to threads that take it piece by piece.
//
// Work is a list of stages, each of some numbered pieces ("tickets"). Threads take tickets as they
// come to them, and a stage is over when its tickets are done, whoever did them. Nobody waits for a
// thread: one that the system has put to sleep, on cores that also serve HTTP, holds up the others by
// the piece in its hands at most, and where an OpenMP region would end with a barrier for all, the
// caller goes on while a helper may still be on its way to find out that nothing is left.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tgi {

struct Stage {
  void (*run)(void* context, int64_t ticket, int thread);
  void* context;
  int64_t tickets;
};

// Run stages one after the other on `threads` threads at most, the caller (thread 0) among them;
// back when all tickets are done. Where `seconds` is given, each stage's time is added to it.
// While another caller is at work, the caller works alone.
void run_stages(int threads, const Stage* stages, size_t count, double* seconds = nullptr);

// The tickets of one stage: run(ticket, thread) for each.
template <class Run>
void share_out(int threads, int64_t total, const Run& run) {
  if (threads <= 1 || total <= 1) {
    for (int64_t ticket = 0; ticket < total; ++ticket) run(ticket, 0);
    return;
  }
  auto call = [](void* context, int64_t ticket, int thread) {
    (*static_cast<const Run*>(context))(ticket, thread);
  };
  const Stage stage{call, const_cast<void*>(static_cast<const void*>(&run)), total};
  run_stages(threads, &stage, 1);
}

}  // namespace tgi
