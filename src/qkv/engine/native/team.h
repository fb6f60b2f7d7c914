// Threads that work on one call together. They wait by spinning for a moment and then sleep, since other programs (torch's
// own threads, for one) want the same cores.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Team {
 public:
  explicit Team(int n);
  ~Team();
  int size() const { return n_; }
  // Runs `work(context, t)` for t = 0 .. size - 1, the first on the calling thread; returns when all are done.
  void run(void (*work)(void*, int), void* context);
  // Within a run: returns when all threads are here.
  void meet();

 private:
  void serve(int t);
  int n_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<int> call_{0}, left_{0}, here_{0}, turn_{0};
  std::atomic<bool> over_{false};
};
