#include "team.h"

#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>

#include <climits>
#else
#include <condition_variable>
#endif
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

#if defined(__linux__)
// No lock around sleep and wake: a sleeper that holds one and loses its core would stop the waker.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_sleepers(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;  // of all words
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  std::unique_lock<std::mutex> lock(sleep_mutex);
  if (word.load() == seen) sleep_condition.wait(lock);
}
void wake_sleepers(std::atomic<uint32_t>&) {
  std::lock_guard<std::mutex> lock(sleep_mutex);
  sleep_condition.notify_all();
}
#endif

// Sequentially consistent on both sides: either the sleeper sees the new value before it sleeps or
// the waker sees the sleeper.
void wake(Signal& signal) {
  if (signal.num_sleeping.load()) wake_sleepers(signal.value);
}

// Until is_met(value): spins at first, then sleeps. `spins` adapts to what has helped.
template <typename Test>
void wait(Signal& signal, int* spins, Test is_met) {
  for (int spin = 0; spin < *spins; ++spin) {
    if (is_met(signal.value.load(std::memory_order_acquire))) {
      *spins = *spins * 2 < MAX_SPINS ? *spins * 2 : MAX_SPINS;
      return;
    }
    relax();
  }
  *spins = *spins / 2 > MIN_SPINS ? *spins / 2 : MIN_SPINS;
  signal.num_sleeping.fetch_add(1);
  for (uint32_t value = signal.value.load(); !is_met(value); value = signal.value.load())
    sleep_while(signal.value, value);
  signal.num_sleeping.fetch_sub(1);
}

}  // namespace

Team::Team(int size) : size_(size), process_(getpid()), patience_(size, Patience{MAX_SPINS}) {
  workers_.reserve(size - 1);
  try {
    for (int member = 1; member < size; ++member)
      workers_.emplace_back([this, member] { work(member); });
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  stop_ = true;
  job_number_.value.fetch_add(1);
  wake(job_number_);
  for (auto& worker : workers_) worker.join();
}

bool Team::is_forked() const { return process_ != getpid(); }

// A worker enters, then looks whether the job is open; run() closes the job, then looks who is
// inside. Sequentially consistent: a worker that found it open is seen, and awaited.
void Team::run(void (*job)(void*, int), void* context) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (size_ == 1) return job(context, 0);
  job_ = job;
  context_ = context;
  is_open_.store(true);
  job_number_.value.fetch_add(1);
  wake(job_number_);
  job(context, 0);
  is_open_.store(false);
  wait(num_inside_, &patience_[0].spins, [](uint32_t inside) { return inside == 0; });
}

void Team::work(int member) {
  uint32_t seen = 0;
  for (;;) {
    int spins = MAX_SPINS;
    wait(job_number_, &spins, [seen](uint32_t number) { return number != seen; });
    seen = job_number_.value.load();
    if (stop_) return;
    num_inside_.value.fetch_add(1);
    if (is_open_.load()) job_(context_, member);
    if (num_inside_.value.fetch_sub(1) == 1) wake(num_inside_);
  }
}

void Team::finish(Signal& num_done, uint32_t num_own, uint32_t count, int member) {
  if (num_own && num_done.value.fetch_add(num_own) + num_own == count) {
    wake(num_done);
    return;
  }
  wait(num_done, &patience_[member].spins, [count](uint32_t done) { return done == count; });
}

}  // namespace pm
