// A persistent team of threads. The caller of run() is member 0; workers sleep between calls.
//
// Inside a job the members walk through the same phases and share out the pieces of each; which
// member takes which piece is left to chance, because no result depends on it. A phase is over
// when its pieces are done, not when every member has arrived: a member that lost its core without
// holding a piece is not waited for, and one that comes late finds nothing to do and walks on.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pm {

// A word that members wait on.
struct Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleeping{0};
};

// The pieces of one phase.
struct alignas(64) Phase {
  std::atomic<int64_t> next{0};
  Signal num_done;
  int64_t take(int64_t count) { return next.fetch_add(count, std::memory_order_relaxed); }
};

class Team {
 public:
  explicit Team(int size);  // throws std::system_error, std::bad_alloc
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  bool is_forked() const;  // made in another process

  // job(context, member) on every member that comes in time; returns when all of them have left.
  void run(void (*job)(void*, int), void* context);

  // piece(first, last) for runs of at most `run` of `count` pieces; returns when all are done.
  template <typename Piece>
  void share(Phase& phase, int member, int64_t count, int64_t run, Piece piece) {
    uint32_t num_own = 0;
    for (int64_t at = phase.take(run); at < count; at = phase.take(run)) {
      const int64_t end = at + run < count ? at + run : count;
      piece(at, end);
      num_own += (uint32_t)(end - at);
    }
    if (size_ > 1) finish(phase.num_done, num_own, (uint32_t)count, member);
  }

 private:
  struct alignas(64) Patience {
    int spins;
  };

  void work(int member);
  void end();
  void finish(Signal& num_done, uint32_t num_own, uint32_t count, int member);

  const int size_;
  const int64_t process_;
  std::mutex run_mutex_;  // one job at a time
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> is_open_{false};  // the job may be joined
  std::atomic<bool> stop_{false};
  alignas(64) Signal job_number_;
  alignas(64) Signal num_inside_;   // workers inside the job
  std::vector<Patience> patience_;  // per member
  std::vector<std::thread> workers_;
};

}  // namespace pm

struct PmPool {
  explicit PmPool(int size) : team(size) {}
  pm::Team team;
};
