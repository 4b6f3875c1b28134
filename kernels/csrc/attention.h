// Paged attention: how the KV pool lies in memory, and the plan that cuts a step's work.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace pm {

// ---- the KV pool (kv_pages.cpp) ----------------------------------------------------------------

// One side (K or V) of one layer is num_pages pages. A page of a float kind is [page_size, G, D]
// numbers; of PM_KV_INT8 per kv head page_size * D bytes q in -127 .. 127, then [G, page_size] float
// scales: x = scale * q. The scale of a row that holds NaN or infinity is NaN. The bytes of a head
// are rows [page_size, D], or where is_packed() as the dot products read them: K
// [D / 4, page_size, 4 of D], V [page_size / 4, D, 4 tokens].
constexpr int64_t RUN = 16;  // positions that a packed page keeps side by side, at the least

struct KvLayout {
  int64_t kind, page_size, num_kv_heads, head_dim;

  bool is_packed() const { return kind == PM_KV_INT8 && page_size % RUN == 0 && head_dim % 16 == 0; }

  int64_t element_bytes() const { return kind == PM_KV_F32 ? 4 : kind == PM_KV_INT8 ? 1 : 2; }
  bool has_scales() const { return kind == PM_KV_INT8; }
  int64_t page_bytes() const {
    return page_size * num_kv_heads * (head_dim * element_bytes() + (has_scales() ? 4 : 0));
  }
  // Of the row of one kv head and one token of a page that is not packed; rows of neighbouring
  // tokens are row_stride bytes apart. Of token 0: where the head begins, packed or not.
  int64_t row_offset(int64_t head, int64_t token) const {
    return (has_scales() ? head * page_size + token : token * num_kv_heads + head) * head_dim *
           element_bytes();
  }
  int64_t row_stride() const {
    return (has_scales() ? 1 : num_kv_heads) * head_dim * element_bytes();
  }
  int64_t scale_offset(int64_t head, int64_t token) const {
    return page_size * num_kv_heads * head_dim + (head * page_size + token) * 4;
  }
};

// k and v [G, D] of one token into its slot.
void kv_write(const KvLayout& kv, unsigned char* k_pages, unsigned char* v_pages, int64_t slot,
              const float* k, const float* v);
// x [D] to integers -127 .. 127; returns the scale, NaN when a number is not finite.
float quantise_row(const float* x, int64_t d, int8_t* out);

// ---- the plan (attention.cpp, attention_plan.cpp) ----------------------------------------------

constexpr int64_t BLOCK = 64;  // positions
constexpr int64_t SPAN = 256;  // positions; a multiple of BLOCK
inline int64_t padded(int64_t d) { return (d + W - 1) / W * W; }

struct AttentionInput {
  const PmBatch* batch;
  const float* q;  // row t, head h at q + t * q_stride + h * D
  int64_t q_stride;
  KvLayout kv;
  const unsigned char* k_pages;
  const unsigned char* v_pages;
  int64_t num_heads, window;
  float* out;  // [T, H, D]
};

struct Task;
struct Running;

// The pieces of one step's attention, the same for every layer: (rows that may share K and V, some
// kv heads, some spans of positions).
class AttentionPlan {
 public:
  AttentionPlan(const PmBatch* batch, int64_t num_heads, const KvLayout& kv, int64_t window,
                int num_threads);  // throws std::bad_alloc
  int64_t num_pieces() const { return (int64_t)pieces_.size() * head_runs_; }
  int64_t scratch_floats() const;  // per thread
  void run(const AttentionInput& input, int64_t index, float* scratch);

 private:
  struct Run {  // rows begin .. end of one sequence, and the positions they see
    int64_t sequence, begin, end, lowest, highest;
  };
  struct Joined {  // runs first .. last, `rows` rows in all, and the positions they see
    size_t first, last;
    int64_t rows, lowest, highest, first_row = 0;
  };
  struct Piece {  // spans first .. last of a task
    size_t task;
    int64_t first, last;
  };
  const int32_t* pages(const Run& run) const {
    return batch_->kv_page_ids + batch_->kv_indptr[run.sequence];
  }
  const int32_t* pages_end(const Run& run) const {
    return batch_->kv_page_ids + batch_->kv_indptr[run.sequence + 1];
  }
  static int64_t spans(const Joined& task);
  void cut_rows(int64_t window);
  void cut_tasks(int64_t wanted);
  bool is_same_block(const Run& a, const Run& b, int64_t first) const;
  void run_block(const AttentionInput& input, const Joined& joined, Task* task, int64_t kv_head,
                 int64_t query, int64_t first) const;
  void keep_partial(const AttentionInput& input, const Piece& piece, int64_t kv_head,
                    const Task& task, int64_t head_run);
  void write(const AttentionInput& input, int64_t row, int64_t head, const Running& result) const;
  template <typename Visit>
  void for_queries(const Joined& joined, int64_t kv_head, Visit visit) const;

  const PmBatch* batch_;
  KvLayout kv_;
  int64_t num_heads_, group_, dp_;
  int64_t most_rows_ = 0;  // that a task may have
  int64_t max_rows_ = 0, max_spans_ = 0, num_rows_ = 0;
  int64_t kv_heads_per_piece_ = 1, head_runs_ = 1;
  bool is_apart_ = false;  // spans are pieces of their own
  std::vector<Run> runs_;
  std::vector<Joined> tasks_;
  std::vector<Piece> pieces_;
  std::unique_ptr<float[]> partial_;  // [row of a task, H, span]: maximum, sum, out [Dp]
  std::unique_ptr<std::atomic<int64_t>[]> num_done_;  // per task and head run: finished spans
};

}  // namespace pm
