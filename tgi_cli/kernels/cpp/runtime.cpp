// What the library is told once, after it was loaded.
#include "pool.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

TGI_EXPORT void tgi_set_runtime(void* parallel, void* thread_number) {
  tgi::runtime.parallel = reinterpret_cast<tgi::Parallel>(parallel);
  tgi::runtime.thread_number = reinterpret_cast<tgi::ThreadNumber>(thread_number);
}

// For tests: how often each of `threads` threads came to run one of `total` tickets.
TGI_EXPORT void tgi_count_tickets(int threads, int64_t total, int64_t* counts) {
  tgi::share_out(threads, total, [&](int64_t, int thread) { ++counts[thread]; });
}
