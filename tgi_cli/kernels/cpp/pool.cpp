#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// How often a helper looks for more work before it sleeps, about 25 us: long enough for the gaps
// between the calls of a step, short beside what the rest of a server would do with the core.
constexpr int IDLE_LOOKS = 2000;
// How often who waits for others' tickets looks before it offers its core to them.
constexpr int BUSY_LOOKS = 20000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

struct alignas(64) Tickets {
  std::atomic<int64_t> taken{0};
  std::atomic<int64_t> done{0};

  void work(const Stage& stage, int thread) {
    int64_t mine = 0;
    while (taken.load(std::memory_order_relaxed) < stage.tickets) {
      int64_t ticket = taken.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= stage.tickets) break;
      stage.run(stage.context, ticket, thread);
      ++mine;
    }
    if (mine) done.fetch_add(mine, std::memory_order_release);
  }

  void wait(int64_t total) const {
    for (int looks = 0; done.load(std::memory_order_acquire) < total; ++looks) {
      if (looks < BUSY_LOOKS)
        pause();
      else
        sched_yield();  // who has the ticket may want this core
    }
  }
};

// The helpers and the work they are at. A helper that comes late touches nothing but what is kept
// here: contexts, which are the caller's, are used by holders of a ticket alone, for whom it waits.
class Pool {
 public:
  void run(int threads, const Stage* stages, size_t count, double* seconds) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (threads <= 1 || !lock.owns_lock()) return alone(stages, count, seconds);
    // Late helpers of the work before; by now they have had the time to leave.
    open_.store(false);
    for (int looks = 0; inside_.load(); ++looks) looks < BUSY_LOOKS ? pause() : void(sched_yield());
    stages_.assign(stages, stages + count);
    if (count > tickets_.size()) tickets_ = std::vector<Tickets>(count);
    for (size_t i = 0; i < count; ++i) {
      tickets_[i].taken.store(0, std::memory_order_relaxed);
      tickets_[i].done.store(0, std::memory_order_relaxed);
    }
    threads_ = threads;
    while (helpers_ < threads - 1) {
      std::thread(&Pool::help, this, ++helpers_, epoch_.load()).detach();
    }
    open_.store(true);
    epoch_.fetch_add(1);
    if (sleepers_.load()) syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    work(0, seconds);
    open_.store(false);
  }

 private:
  static void alone(const Stage* stages, size_t count, double* seconds) {
    for (size_t i = 0; i < count; ++i) {
      double before = seconds ? now() : 0;
      for (int64_t ticket = 0; ticket < stages[i].tickets; ++ticket)
        stages[i].run(stages[i].context, ticket, 0);
      if (seconds) seconds[i] += now() - before;
    }
  }

  void work(int thread, double* seconds) {
    double before = seconds ? now() : 0;
    for (size_t i = 0; i < stages_.size(); ++i) {
      tickets_[i].work(stages_[i], thread);
      tickets_[i].wait(stages_[i].tickets);
      if (!seconds) continue;
      double after = now();
      seconds[i] += after - before;
      before = after;
    }
  }

  void help(int thread, uint32_t seen) {
    pthread_setname_np(pthread_self(), "tgi-kernels");
    for (;;) {
      for (int looks = 0; epoch_.load() == seen && looks < IDLE_LOOKS; ++looks) pause();
      while (epoch_.load() == seen) {
        sleepers_.fetch_add(1);
        syscall(SYS_futex, &epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1);
      }
      seen = epoch_.load();
      // In this order: who closes the work either sees us inside, or we see that it is closed.
      inside_.fetch_add(1);
      if (open_.load() && thread < threads_) work(thread, nullptr);
      inside_.fetch_sub(1);
    }
  }

  std::mutex mutex_;  // of the callers
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0}, inside_{0};
  std::atomic<bool> open_{false};
  int threads_ = 1, helpers_ = 0;
  std::vector<Stage> stages_;
  std::vector<Tickets> tickets_;
};

alignas(Pool) unsigned char memory[sizeof(Pool)];

// Never destroyed: helpers outlive everything. A process that was forked begins anew, without any.
Pool& pool() {
  static Pool* const made = [] {
    pthread_atfork(nullptr, nullptr, [] { new (memory) Pool; });
    return new (memory) Pool;
  }();
  return *made;
}

}  // namespace

void run_stages(int threads, const Stage* stages, size_t count, double* seconds) {
  pool().run(threads, stages, count, seconds);
}

}  // namespace tgi

// For tests: how often each of `threads` threads came to run one of `total` tickets.
TGI_EXPORT void tgi_count_tickets(int threads, int64_t total, int64_t* counts) {
  tgi::share_out(threads, total, [&](int64_t, int thread) { ++counts[thread]; });
}
