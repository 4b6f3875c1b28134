// How the attention of one step is cut into pieces; which cut is taken changes no bit.
#include <limits>

#include "attention.h"

namespace pm {
namespace {

constexpr int64_t FEW_TASK_QUERIES = 12;
constexpr int64_t TASK_QUERIES = 96;  // rows x heads of a group in one task, if one row allows

}  // namespace

AttentionPlan::AttentionPlan(const PmBatch* batch, int64_t num_heads, const KvLayout& kv,
                             int64_t window, int num_threads)
    : batch_(batch),
      kv_(kv),
      num_heads_(num_heads),
      group_(num_heads / kv.num_kv_heads),
      dp_(padded(kv.head_dim)) {
  // Pages that need no gathering cost little to read again: then rather many tasks than few.
  const int64_t wanted_tasks = (6 * num_threads + kv.num_kv_heads - 1) / kv.num_kv_heads;
  most_rows_ = std::max<int64_t>(1, TASK_QUERIES / group_);
  if (kv.is_packed())
    most_rows_ = std::clamp((batch->num_tokens + wanted_tasks - 1) / wanted_tasks,
                            std::min((FEW_TASK_QUERIES + group_ - 1) / group_, most_rows_),
                            most_rows_);
  cut_rows(window);
  // Rows of different sequences join one task when they read the same first block.
  for (size_t r = 0; r < runs_.size(); ++r) {
    const int64_t rows = runs_[r].end - runs_[r].begin;
    if (!tasks_.empty()) {
      Joined& last = tasks_.back();
      const Run& first = runs_[last.first];
      if (last.rows + rows <= most_rows_ &&
          is_same_block(first, runs_[r], first.lowest / BLOCK * BLOCK)) {
        last.last = r + 1;
        last.rows += rows;
        last.lowest = std::min(last.lowest, runs_[r].lowest);
        last.highest = std::max(last.highest, runs_[r].highest);
        continue;
      }
    }
    tasks_.push_back({r, r + 1, rows, runs_[r].lowest, runs_[r].highest});
  }
  cut_tasks(2 * num_threads);
}

// Runs of rows of one sequence, those of sequences with equal beginnings side by side.
void AttentionPlan::cut_rows(int64_t window) {
  for (int64_t b = 0; b < batch_->num_sequences; ++b) {
    const int64_t end = batch_->qo_indptr[b + 1];
    for (int64_t row = batch_->qo_indptr[b]; row < end; row += most_rows_) {
      Run run{b, row, std::min(row + most_rows_, end), std::numeric_limits<int64_t>::max(), 0};
      for (int64_t i = run.begin; i < run.end; ++i) {
        const int64_t position = batch_->positions[i];
        const int64_t oldest = window > 0 && position >= window ? position - window + 1 : 0;
        run.lowest = std::min(run.lowest, oldest);
        run.highest = std::max(run.highest, position);
      }
      runs_.push_back(run);
    }
  }
  std::stable_sort(runs_.begin(), runs_.end(), [this](const Run& a, const Run& b) {
    return std::lexicographical_compare(pages(a), pages_end(a), pages(b), pages_end(b));
  });
}

// Tasks into pieces, at least `wanted` if that can be: a few rows keep all kv heads in one piece
// (their K and V are neighbours in memory); where tasks are few, spans are computed apart.
void AttentionPlan::cut_tasks(int64_t wanted) {
  int64_t num_spans = 0;
  for (const Joined& task : tasks_) {
    max_rows_ = std::max(max_rows_, task.rows);
    max_spans_ = std::max(max_spans_, spans(task));
    num_spans += spans(task);
  }
  const int64_t num_tasks = (int64_t)tasks_.size();
  const bool is_few = max_rows_ == 1 || max_rows_ * group_ < FEW_TASK_QUERIES;
  const bool all_heads = is_few && std::max(num_tasks, num_spans) >= wanted;
  kv_heads_per_piece_ = all_heads ? kv_.num_kv_heads : 1;
  head_runs_ = kv_.num_kv_heads / kv_heads_per_piece_;
  is_apart_ = num_tasks * head_runs_ < wanted && max_spans_ > 1;
  for (size_t t = 0; t < tasks_.size(); ++t) {
    tasks_[t].first_row = num_rows_;
    num_rows_ += tasks_[t].rows;
    const int64_t first = tasks_[t].lowest / SPAN, last = first + spans(tasks_[t]);
    for (int64_t span = first; is_apart_ && span < last; ++span)
      pieces_.push_back({t, span, span + 1});
    if (!is_apart_) pieces_.push_back({t, first, last});
  }
  // Long pieces first, so that no member is left alone with one.
  std::stable_sort(pieces_.begin(), pieces_.end(), [this](const Piece& a, const Piece& b) {
    return (a.last - a.first) * tasks_[a.task].rows > (b.last - b.first) * tasks_[b.task].rows;
  });
  if (!is_apart_) return;
  partial_.reset(new float[(size_t)(num_rows_ * num_heads_ * max_spans_ * (dp_ + 2))]);
  num_done_.reset(new std::atomic<int64_t>[(size_t)(num_tasks * head_runs_)]());
}

int64_t AttentionPlan::spans(const Joined& task) {
  return task.highest / SPAN - task.lowest / SPAN + 1;
}

// Whether both runs read the block, from the same pages.
bool AttentionPlan::is_same_block(const Run& a, const Run& b, int64_t first) const {
  for (const Run* run : {&a, &b})
    if (first > run->highest || first + BLOCK <= run->lowest) return false;
  const int64_t page = first / kv_.page_size;
  const auto slice_end = [&](const Run& run) {
    return std::min(run.highest, first + BLOCK - 1) / kv_.page_size + 1;
  };
  const int64_t end = slice_end(a);
  return end == slice_end(b) && std::equal(pages(a) + page, pages(a) + end, pages(b) + page);
}

}  // namespace pm
