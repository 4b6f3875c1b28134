#include "team.h"

#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pm {
namespace {

// Spinning some 40 us covers the imbalance of a phase. Where the cores are wanted by others it
// rarely helps and burns the time that the awaited member needs: then less and less.
constexpr int MAX_SPINS = 2048, MIN_SPINS = 16;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int size) : size_(size), process_(getpid()), patience_(size, Patience{MAX_SPINS}) {
  workers_.reserve(size - 1);
  try {
    for (int member = 1; member < size; ++member)
      workers_.emplace_back([this, member] { work(member); });
  } catch (...) {
    stop_ = true;
    job_number_.fetch_add(1);
    wake_all();
    for (auto& worker : workers_) worker.join();
    throw;
  }
}

Team::~Team() {
  stop_ = true;
  job_number_.fetch_add(1);
  wake_all();
  for (auto& worker : workers_) worker.join();
}

bool Team::is_forked() const { return process_ != getpid(); }

void Team::run(void (*job)(void*, int), void* context) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  job_ = job;
  context_ = context;
  if (size_ > 1) {
    job_number_.fetch_add(1);
    wake_all();
  }
  job(context, 0);
  barrier(0);
}

void Team::work(int member) {
  uint32_t seen = 0;
  for (;;) {
    int spins = MAX_SPINS;
    wait_for_change(job_number_, seen, &spins);
    ++seen;
    if (stop_) return;
    job_(context_, member);
    barrier(member);
  }
}

void Team::barrier(int member) {
  if (size_ == 1) return;
  const uint32_t seen = barrier_number_.load();
  if (num_arrived_.fetch_add(1) + 1 == size_) {
    num_arrived_.store(0);
    barrier_number_.fetch_add(1);
    wake_all();
  } else {
    wait_for_change(barrier_number_, seen, &patience_[member].spins);
  }
}

// Sequentially consistent on both sides: either the sleeper sees the new word before it sleeps or
// the waker sees the sleeper.
void Team::wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen, int* spins) {
  for (int spin = 0; spin < *spins; ++spin) {
    if (word.load(std::memory_order_acquire) != seen) {
      *spins = *spins * 2 < MAX_SPINS ? *spins * 2 : MAX_SPINS;
      return;
    }
    relax();
  }
  *spins = *spins / 2 > MIN_SPINS ? *spins / 2 : MIN_SPINS;
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  num_sleeping_.fetch_add(1);
  while (word.load() == seen) sleep_condition_.wait(lock);
  num_sleeping_.fetch_sub(1);
}

void Team::wake_all() {
  if (num_sleeping_.load() == 0) return;
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  sleep_condition_.notify_all();
}

}  // namespace pm
