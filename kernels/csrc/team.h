// A persistent team of threads. The caller of run() is member 0; workers sleep between calls.
//
// Inside a job the members meet at barrier() and share out work by Counter; which member takes
// which piece is left to chance, because no result depends on it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pm {

class Team {
 public:
  explicit Team(int size);  // throws std::system_error, std::bad_alloc
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  bool is_forked() const;  // made in another process

  // job(context, member) on every member; returns when all have returned.
  void run(void (*job)(void*, int), void* context);
  // Waits until every member of the running job is here.
  void barrier(int member);

 private:
  void work(int member);
  void wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen, int* spins);
  void wake_all();

  const int size_;
  const int64_t process_;
  std::mutex run_mutex_;  // one job at a time
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;

  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<uint32_t> barrier_number_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable sleep_condition_;
  struct alignas(64) Patience {
    int spins;
  };
  std::vector<Patience> patience_;  // per member
  std::vector<std::thread> workers_;
};

// The next piece of work of one phase, shared by all members.
struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
  int64_t take(int64_t count) { return next.fetch_add(count, std::memory_order_relaxed); }
};

}  // namespace pm

struct PmPool {
  explicit PmPool(int size) : team(size) {}
  pm::Team team;
};
