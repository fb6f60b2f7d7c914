#include "team.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX()
#endif

namespace {

constexpr int SPINS = 2000;  // some 50 microseconds: between the steps of a text a thread stays awake, and no longer

// Waits until `done()`; gives the core away in between, for where there are more threads than cores.
template <class Done>
void spin(Done done) {
  for (int i = 0; !done(); i++) {
    RELAX();
    if (i % SPINS == SPINS - 1) std::this_thread::yield();
  }
}

}  // namespace

Team::Team(int n) : n_(n < 1 ? 1 : n) {
  for (int t = 1; t < n_; t++) threads_.emplace_back(&Team::serve, this, t);
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    call_++;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*work)(void*, int), void* context) {
  if (n_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work;
      context_ = context;
      left_ = n_ - 1;
      call_++;
    }
    wake_.notify_all();
  }
  work(context, 0);
  spin([&] { return left_.load(std::memory_order_acquire) == 0; });
}

void Team::meet() {
  if (n_ == 1) return;
  int turn = turn_.load(std::memory_order_relaxed);
  if (here_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
    here_.store(0, std::memory_order_relaxed);
    turn_.store(turn + 1, std::memory_order_release);
  } else {
    spin([&] { return turn_.load(std::memory_order_acquire) != turn; });
  }
}

void Team::serve(int t) {
  for (int seen = 0;;) {
    bool called = false;
    for (int i = 0; i < SPINS && !called; i++) {
      called = call_.load(std::memory_order_acquire) != seen;
      RELAX();
    }
    if (!called) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return call_.load() != seen; });
    }
    seen = call_.load(std::memory_order_acquire);
    if (over_) return;
    work_(context_, t);
    left_.fetch_sub(1, std::memory_order_acq_rel);
  }
}
