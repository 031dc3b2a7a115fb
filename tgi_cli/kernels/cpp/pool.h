// Work shared out to torch's threads.
//
// torch's pool is used, not one of our own: two pools on the same cores would spin against each
// other. Inside a region threads take numbered pieces of work ("tickets") as they come to them.
// So a thread that the system has put to sleep holds up the others only by the piece in its
// hands, where an equal split would wait for it at the end of every operation.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "simd.h"

namespace tgi {

constexpr int MAX_THREADS = 256;

// libgomp's entry points, as torch has them; https://gcc.gnu.org/onlinedocs/libgomp/
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
using ThreadNumber = int (*)();

struct Runtime {
  Parallel parallel = nullptr;
  ThreadNumber thread_number = nullptr;
};
inline Runtime runtime;

// body(thread) on `threads` threads at once; on this one alone where there is no pool.
template <class Body>
void parallel(int threads, const Body& body) {
  if (threads <= 1 || !runtime.parallel) {
    body(0);
    return;
  }
  auto enter = [](void* data) { (*static_cast<const Body*>(data))(runtime.thread_number()); };
  runtime.parallel(enter, const_cast<void*>(static_cast<const void*>(&body)), unsigned(threads), 0);
}

TGI_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One operation's pieces: how many were taken, how many are done. Zero both before a region.
struct alignas(64) Tickets {
  std::atomic<int64_t> taken;
  std::atomic<int64_t> done;

  void reset() {
    taken.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }

  // run(ticket) for each that this thread gets hold of.
  template <class Run>
  TGI_INLINE void work(int64_t total, const Run& run) {
    int64_t mine = 0;
    while (taken.load(std::memory_order_relaxed) < total) {
      int64_t ticket = taken.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= total) break;
      run(ticket);
      ++mine;
    }
    if (mine) done.fetch_add(mine, std::memory_order_release);
  }

  // Until all pieces are done, whoever has them.
  TGI_INLINE void wait(int64_t total) {
    for (int spins = 0; done.load(std::memory_order_acquire) < total; ++spins) {
      if (spins < 20000)
        pause();
      else
        sched_yield();  // its owner may want this core
    }
  }
};

// A region of a single operation.
template <class Run>  // run(ticket, thread)
void share_out(int threads, int64_t total, const Run& run) {
  if (threads <= 1 || total <= 1) {
    for (int64_t ticket = 0; ticket < total; ++ticket) run(ticket, 0);
    return;
  }
  Tickets tickets;
  tickets.reset();
  parallel(threads, [&](int thread) {
    tickets.work(total, [&](int64_t ticket) { run(ticket, thread); });
  });
}

}  // namespace tgi
