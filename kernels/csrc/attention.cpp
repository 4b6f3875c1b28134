// Paged, ragged, causal attention with grouped query heads: softmax(q K^T / sqrt(D)) V.
//
// The order of operations of one (query, head), whatever else runs: positions in blocks of BLOCK,
// aligned to absolute position (not to pages or chunks); per block the scores (one chain over d
// each), the running maximum, the exponentials, their sum (a fixed tree), then one chain over the
// block's positions per output element. Only positions the query may see take part; blocks
// without any are skipped. Every SPAN positions the running result is merged into the total, so
// that spans may be computed apart and merged in their order with the same bits. The online
// rescaling is that of FlashAttention (Dao et al., 2022), spans apart that of Flash-Decoding.
//
// A block is gathered once and serves all queries of the task that read the same pages there: the
// rows and heads of one sequence, and sequences that share a prefix. Each query keeps its own
// order, so who shares a task with whom changes no bit.
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_block.h"

namespace pm {
namespace {

// So many queries of a block hide the time until the hardware has fetched the next one.
constexpr int64_t MANY_QUERIES = 48;

// Hands out aligned pieces of memory; without memory it only counts.
class Scratch {
 public:
  explicit Scratch(float* memory) : start_(((uintptr_t)memory + 63) / 64 * 64) {}
  template <typename T>
  void take(T** pointer, int64_t count) {
    *pointer = (T*)(start_ + (uintptr_t)used_);
    used_ += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
  }
  int64_t floats() const { return (used_ + 64) / 4; }

 private:
  uintptr_t start_;
  int64_t used_ = 0;
};

void place_floats(Task* task, int64_t num_queries, Scratch* scratch) {
  FloatBlock& b = task->floats;
  scratch->take(&b.q, num_queries * task->d);
  scratch->take(&b.kt, task->d * BLOCK);
  scratch->take(&b.scores, num_queries * BLOCK);
  scratch->take(&b.k_wide, BLOCK * task->dp);
  scratch->take(&b.v_wide, BLOCK * task->dp);
  scratch->take(&b.zeros, task->dp);
}

void place_ints(Task* task, int64_t num_queries, Scratch* scratch) {
  IntBlock& b = task->ints;
  scratch->take(&b.q, num_queries * task->words);
  scratch->take(&b.q_scale, num_queries);
  scratch->take(&b.q_start, num_queries);
  scratch->take(&b.kt, padded(task->words) * BLOCK);
  scratch->take(&b.vt, BLOCK / 4 * task->dp);
  scratch->take(&b.k_scale, BLOCK);
  scratch->take(&b.v_scale, BLOCK);
  scratch->take(&b.rows, BLOCK * padded(task->words) * 4);
}

// Lays the arrays of a task out; returns the floats they take.
int64_t place(Task* task, int64_t num_queries, const KvLayout& kv, float* memory) {
  Scratch scratch(memory);
  task->d = kv.head_dim;
  task->dp = padded(kv.head_dim);
  task->words = (kv.head_dim + 3) / 4;
  scratch.take(&task->out, num_queries * task->dp);
  scratch.take(&task->maximum, num_queries);
  scratch.take(&task->sum, num_queries);
  scratch.take(&task->total, num_queries * task->dp);
  scratch.take(&task->total_maximum, num_queries);
  scratch.take(&task->total_sum, num_queries);
  scratch.take(&task->position, num_queries);
  scratch.take(&task->begin, num_queries);
  scratch.take(&task->end, num_queries);
  if (kv.kind == PM_KV_INT8)
    place_ints(task, num_queries, &scratch);
  else
    place_floats(task, num_queries, &scratch);
  return scratch.floats();
}

void empty(float* maximum, float* sum, float* out, int64_t num_queries, int64_t dp) {
  std::fill_n(maximum, num_queries, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, num_queries, 0.0f);
  std::fill_n(out, num_queries * dp, 0.0f);
}

// Asks for the rows of some heads ahead of time: rows of one head lie apart, so the hardware does
// not guess them.
void prefetch_rows(const unsigned char* side, const KvLayout& kv, const BlockPlace& at,
                   int64_t num_heads) {
  const int64_t row_bytes = kv.head_dim * kv.element_bytes();
  for_page_runs(kv.page_size, at, [&](int64_t, int64_t page, int64_t token, int64_t n) {
    for (int64_t head = at.kv_head; head < at.kv_head + num_heads; ++head) {
      const unsigned char* row = side + page * kv.page_bytes() + kv.row_offset(head, token);
      for (int64_t i = 0; i < n; ++i, row += kv.row_stride())
        for (int64_t j = 0; j < row_bytes; j += 64) __builtin_prefetch(row + j, 0, 2);
    }
  });
}

// total = keep * total + take * part, relative to the maximum `now` of both.
PM_INLINE void add_part(Running* total, const Running& part, float now, float keep, float take,
                        int64_t dp) {
  total->maximum = now;
  total->sum = total->sum * keep + part.sum * take;
  for (int64_t i = 0; i < dp; i += W)
    store(total->out + i,
          fma(load(total->out + i), splat(keep), load(part.out + i) * splat(take)));
}

// total = total and part together. A part without positions has the sum 0 and changes nothing.
void merge(Running* total, const Running& part, int64_t dp) {
  if (part.sum == 0.0f) return;
  const F now = max(splat(total->maximum), splat(part.maximum));
  const F keep = exp(splat(total->maximum) - now), take = exp(splat(part.maximum) - now);
  add_part(total, part, now[0], keep[0], take[0], dp);
}

// The span of every query merged into its total, as merge() does; the exponentials of W queries
// at once.
void finish_span(Task* task, int64_t num_queries) {
  const int64_t dp = task->dp;
  for (int64_t first = 0; first < num_queries; first += W) {
    const int64_t queries = std::min<int64_t>(W, num_queries - first);
    const F total_maximum = load_first(task->total_maximum + first, queries);
    const F maximum = load_first(task->maximum + first, queries);
    const F now = max(total_maximum, maximum);
    const F keep = exp(total_maximum - now), take = exp(maximum - now);
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t i = first + r;
      if (task->sum[i] == 0.0f) continue;
      Running total{task->total_maximum[i], task->total_sum[i], task->total + i * dp};
      add_part(&total, {task->maximum[i], task->sum[i], task->out + i * dp}, now[r], keep[r],
               take[r], dp);
      task->total_maximum[i] = total.maximum;
      task->total_sum[i] = total.sum;
    }
  }
  empty(task->maximum, task->sum, task->out, num_queries, dp);
}

// What the queries first_query .. last_query see of the block at position `first`.
void set_visible(Task* task, int64_t first_query, int64_t last_query, int64_t first,
                 int64_t window) {
  for (int64_t i = first_query; i < last_query; ++i) {
    const int64_t position = task->position[i];
    const int64_t oldest = window > 0 && position >= window ? position - window + 1 : 0;
    task->begin[i] = oldest > first ? oldest - first : 0;
    task->end[i] = position - first + 1 < BLOCK ? position - first + 1 : BLOCK;
    if (task->begin[i] >= task->end[i]) task->begin[i] = task->end[i] = 0;
  }
}

}  // namespace

int64_t AttentionPlan::scratch_floats() const {
  Task task;
  return place(&task, max_rows_ * kv_heads_per_piece_ * group_, kv_, nullptr);
}

void AttentionPlan::run(const AttentionInput& in, int64_t index, float* scratch) {
  const Piece& piece = pieces_[(size_t)(index / head_runs_)];
  const Joined& joined = tasks_[piece.task];
  const int64_t kv_head = index % head_runs_ * kv_heads_per_piece_;
  const int64_t num_queries = joined.rows * kv_heads_per_piece_ * group_;
  Task task;
  place(&task, num_queries, kv_, scratch);
  empty(task.maximum, task.sum, task.out, num_queries, dp_);
  empty(task.total_maximum, task.total_sum, task.total, num_queries, dp_);
  for_queries(joined, kv_head, [&](int64_t i, int64_t row, int64_t, int64_t head) {
    const float* q = in.q + row * in.q_stride + head * kv_.head_dim;
    kv_.kind == PM_KV_INT8 ? set_query_int8(&task, i, q) : set_query_float(&task, i, q);
    task.position[i] = batch_->positions[row];
  });
  for (int64_t span = piece.first; span < piece.last; ++span) {
    const int64_t begin = std::max(joined.lowest / BLOCK * BLOCK, span * SPAN);
    const int64_t end = std::min(joined.highest + 1, (span + 1) * SPAN);
    for (int64_t first = begin; first < end; first += BLOCK)
      for (int64_t h = 0; h < kv_heads_per_piece_; ++h)
        run_block(in, joined, &task, kv_head + h, h * joined.rows * group_, first);
    finish_span(&task, num_queries);
  }
  if (is_apart_) return keep_partial(in, piece, kv_head, task, index % head_runs_);
  for_queries(joined, kv_head, [&](int64_t i, int64_t row, int64_t, int64_t head) {
    write(in, row, head, {task.total_maximum[i], task.total_sum[i], task.total + i * dp_});
  });
}

// Keeps the result of one span; whoever is last merges the spans in their order.
void AttentionPlan::keep_partial(const AttentionInput& in, const Piece& piece, int64_t kv_head,
                                 const Task& task, int64_t head_run) {
  const Joined& joined = tasks_[piece.task];
  const int64_t first = joined.lowest / SPAN, count = spans(joined);
  const auto slot = [&](int64_t task_row, int64_t head, int64_t span) {
    const int64_t at = ((joined.first_row + task_row) * num_heads_ + head) * max_spans_ + span;
    return partial_.get() + at * (dp_ + 2);
  };
  for_queries(joined, kv_head, [&](int64_t i, int64_t, int64_t task_row, int64_t head) {
    float* at = slot(task_row, head, piece.first - first);
    at[0] = task.total_maximum[i];
    at[1] = task.total_sum[i];
    std::copy_n(task.total + i * dp_, dp_, at + 2);
  });
  std::atomic<int64_t>& done = num_done_[(size_t)((int64_t)piece.task * head_runs_ + head_run)];
  if (done.fetch_add(1) + 1 < count) return;
  done.store(0);  // for the next layer
  for_queries(joined, kv_head, [&](int64_t i, int64_t row, int64_t task_row, int64_t head) {
    Running total{-std::numeric_limits<float>::infinity(), 0.0f, task.total + i * dp_};
    std::fill_n(total.out, dp_, 0.0f);
    for (int64_t span = 0; span < count; ++span) {
      float* at = slot(task_row, head, span);
      merge(&total, {at[0], at[1], at + 2}, dp_);
    }
    write(in, row, head, total);
  });
}

void AttentionPlan::write(const AttentionInput& in, int64_t row, int64_t head,
                          const Running& result) const {
  float* out = in.out + (row * num_heads_ + head) * kv_.head_dim;
  const float inverse = 1.0f / result.sum;
  for (int64_t j = 0; j < kv_.head_dim; ++j) out[j] = result.out[j] * inverse;
}

// visit(query of the task, row of the step, row of the task, head): kv head by kv head.
template <typename Visit>
void AttentionPlan::for_queries(const Joined& joined, int64_t kv_head, Visit visit) const {
  int64_t query = 0;
  for (int64_t h = kv_head; h < kv_head + kv_heads_per_piece_; ++h) {
    int64_t task_row = 0;
    for (size_t r = joined.first; r < joined.last; ++r)
      for (int64_t row = runs_[r].begin; row < runs_[r].end; ++row, ++task_row)
        for (int64_t head = h * group_; head < (h + 1) * group_; ++head)
          visit(query++, row, task_row, head);
  }
}

// One block and kv head for every run of the task that reads it: neighbours with equal pages
// together. `query` is the first of the kv head.
void AttentionPlan::run_block(const AttentionInput& in, const Joined& joined, Task* task,
                              int64_t kv_head, int64_t query, int64_t first) const {
  for (size_t r = joined.first; r < joined.last;) {
    const Run& leader = runs_[r];
    int64_t end = query + (leader.end - leader.begin) * group_, highest = leader.highest;
    size_t next = r + 1;
    for (; next < joined.last && is_same_block(leader, runs_[next], first); ++next) {
      end += (runs_[next].end - runs_[next].begin) * group_;
      highest = std::max(highest, runs_[next].highest);
    }
    if (first <= leader.highest && first + BLOCK > leader.lowest) {
      const int64_t heads = kv_heads_per_piece_, head = kv_head % heads;
      const auto place = [&](int64_t at_head, int64_t at, int64_t last) {
        return BlockPlace{pages(leader), at_head, at, std::min(last + 1 - at, BLOCK)};
      };
      const BlockPlace at = place(kv_head, first, highest);
      const BlockPlace after = place(kv_head - head, first + BLOCK, leader.highest);
      if (!kv_.is_packed() && head == 0) {
        prefetch_rows(in.v_pages, kv_, at, heads);
        prefetch_rows(in.k_pages, kv_, after, heads);
      }
      set_visible(task, query, end, first, in.window);
      if (kv_.kind == PM_KV_INT8) {
        BlockPlace next = head + 1 < heads ? place(kv_head + 1, first, highest) : after;
        if (end - query > MANY_QUERIES) next.count = 0;
        gather_int8(task, in, at, next);
        attend_int8(task, query, end, at.count);
      } else {
        gather_float(task, in, at);
        attend_float(task, query, end, at.count);
      }
    }
    query = end;
    r = next;
  }
}

}  // namespace pm
