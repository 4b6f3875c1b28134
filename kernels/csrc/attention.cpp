// Paged, ragged, causal attention with grouped query heads: softmax(q K^T / sqrt(D)) V.
//
// The order of operations of one (query, head), whatever else runs: positions in blocks of BLOCK,
// aligned to absolute position (not to pages or chunks); per block the scores (one chain over d
// each), the running maximum, the exponentials, their sum (a fixed tree), then one chain over the
// block's positions per output element. Only positions the query may see take part; blocks
// without any are skipped. The online rescaling is that of FlashAttention (Dao et al., 2022).
//
// K of a block is transposed once, so that positions lie in lanes, and serves all queries of the
// task that read the same pages there: the rows and heads of one sequence, and sequences that share
// a prefix. Each query keeps its own order, so who shares a task with whom changes no bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace pm {

constexpr int64_t BLOCK = 64;

// The state of one task; arrays lie in the thread's scratch.
struct Task {
  int64_t d, dp;
  float* q;         // [nq, D], scaled
  float* kt;        // [D, BLOCK]
  float* scores;    // [nq, BLOCK]
  float* out;       // [nq, Dp]
  float* values;    // [BLOCK, Dp], used when D is no multiple of W
  float* zeros;     // [Dp]
  float* maximum;   // [nq]
  float* sum;       // [nq]
  int64_t* position;  // [nq]
  int64_t* begin;     // [nq] valid positions of the block: begin .. end
  int64_t* end;       // [nq]
  const float* k_rows[BLOCK];
  const float* v_rows[BLOCK];
};

namespace {

constexpr int CHUNK = 4;  // vectors per tile
#if PM_W == 16
constexpr int QUERIES = 6;  // queries per tile: 6 x 4 accumulators of 32 registers
#else
constexpr int QUERIES = 3;  // 3 x 4 of 16
#endif
constexpr int64_t TASK_QUERIES = 48;  // query rows x heads of one task, at most, if rows allow

int64_t padded(int64_t d) { return (d + W - 1) / W * W; }

// scores[r][i] = sum over d of q[r][d] * kt[d][i], for CHUNK vectors of positions.
template <int R>
void score_tile(const float* q, int64_t d_count, const float* kt, float* scores) {
  F acc[R][CHUNK];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = F{};
  for (int64_t d = 0; d < d_count; ++d) {
    F k[CHUNK];
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) k[c] = load(kt + d * BLOCK + c * W);
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const F x = splat(q[r * d_count + d]);
      PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = fma(x, k[c], acc[r][c]);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) store(scores + r * BLOCK + c * W, acc[r][c]);
}

// out[r][..] += sum over positions a .. b of weights[r][i] * rows[i][..], for C vectors.
template <int R, int C>
void value_tile(const float* weights, const float* const* rows, int64_t offset, int64_t a,
                int64_t b, float* out, int64_t stride) {
  F acc[R][C];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * stride + c * W);
  for (int64_t i = a; i < b; ++i) {
    F v[C];
    PM_UNROLL for (int c = 0; c < C; ++c) v[c] = load(rows[i] + offset + c * W);
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const F x = splat(weights[r * BLOCK + i]);
      PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = fma(x, v[c], acc[r][c]);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < C; ++c) store(out + r * stride + c * W, acc[r][c]);
}

typedef void (*ScoreTile)(const float*, int64_t, const float*, float*);
typedef void (*ValueTile)(const float*, const float* const*, int64_t, int64_t, int64_t, float*,
                          int64_t);
#define PM_VALUES(R) {value_tile<R, 1>, value_tile<R, 2>, value_tile<R, 3>, value_tile<R, 4>}
constexpr ScoreTile SCORE_TILES[] = {
    score_tile<1>, score_tile<2>, score_tile<3>,
#if PM_W == 16
    score_tile<4>, score_tile<5>, score_tile<6>,
#endif
};
constexpr ValueTile VALUE_TILES[][CHUNK] = {
    PM_VALUES(1), PM_VALUES(2), PM_VALUES(3),
#if PM_W == 16
    PM_VALUES(4), PM_VALUES(5), PM_VALUES(6),
#endif
};
#undef PM_VALUES

int64_t task_floats(int64_t num_queries, int64_t d) {
  const int64_t dp = padded(d);
  const int64_t floats = num_queries * d + d * BLOCK + num_queries * BLOCK + num_queries * dp +
                         BLOCK * dp + dp + 2 * num_queries + 6 * num_queries;
  return (floats + 63) / 64 * 64 + 64;
}

void place(Task* task, int64_t num_queries, int64_t d, float* scratch) {
  const int64_t dp = padded(d);
  task->d = d;
  task->dp = dp;
  task->position = (int64_t*)scratch;  // 8-byte values first: alignment
  task->begin = task->position + num_queries;
  task->end = task->begin + num_queries;
  task->kt = (float*)(task->end + num_queries);
  task->scores = task->kt + d * BLOCK;
  task->out = task->scores + num_queries * BLOCK;
  task->values = task->out + num_queries * dp;
  task->zeros = task->values + BLOCK * dp;
  task->q = task->zeros + dp;
  task->maximum = task->q + num_queries * d;
  task->sum = task->maximum + num_queries;
  std::memset(task->zeros, 0, (size_t)dp * sizeof(float));
  std::memset(task->out, 0, (size_t)(num_queries * dp) * sizeof(float));
}

// Asks for the block's rows ahead of time: rows of one head lie apart, so the hardware does not
// guess them.
void prefetch_block(const float* rows, const AttentionInput& in, const int32_t* pages,
                    int64_t kv_head, int64_t first, int64_t count) {
  const int64_t d = in.head_dim, width = in.num_kv_heads * d;
  int64_t page = first / in.page_size, offset = first % in.page_size, i = 0;
  while (i < count) {
    const float* at = rows + ((int64_t)pages[page] * in.page_size + offset) * width + kv_head * d;
    const int64_t end = std::min(count, i + in.page_size - offset);
    for (; i < end; ++i, at += width)
      for (int64_t j = 0; j < d; j += 16) __builtin_prefetch(at + j, 0, 2);
    ++page;
    offset = 0;
  }
}

// Pointers to the block's rows; positions past `count` read zeros (they are masked anyway).
void gather_block(Task* task, const AttentionInput& in, const int32_t* pages, int64_t kv_head,
                  int64_t first, int64_t count) {
  const int64_t d = task->d, width = in.num_kv_heads * d;
  int64_t page = first / in.page_size, offset = first % in.page_size, i = 0;
  while (i < count) {
    int64_t at = ((int64_t)pages[page] * in.page_size + offset) * width + kv_head * d;
    const int64_t end = std::min(count, i + in.page_size - offset);
    for (; i < end; ++i, at += width) {
      task->k_rows[i] = in.k_pages + at;
      task->v_rows[i] = in.v_pages + at;
    }
    ++page;
    offset = 0;
  }
  for (; i < BLOCK; ++i) task->k_rows[i] = task->v_rows[i] = task->zeros;
  for (i = 0; i < count; i += W) {
    int64_t column = 0;
    for (; column + W <= d; column += W)
      transpose(task->k_rows + i, column, task->kt + column * BLOCK + i, BLOCK);
    for (; column < d; ++column)
      for (int64_t j = i; j < i + W; ++j) task->kt[column * BLOCK + j] = task->k_rows[j][column];
  }
  if (task->dp == d) return;
  for (i = 0; i < count; ++i) {
    float* row = task->values + i * task->dp;
    std::memcpy(row, task->v_rows[i], (size_t)d * sizeof(float));
    for (int64_t j = d; j < task->dp; ++j) row[j] = 0.0f;
    task->v_rows[i] = row;
  }
}

// Scores of query `index` in this block into weights; rescales its output row.
void softmax_block(Task* task, int64_t index) {
  const int64_t a = task->begin[index], b = task->end[index];
  if (a >= b) return;
  float* scores = task->scores + index * BLOCK;
  const F lowest = splat(-std::numeric_limits<float>::infinity());
  F maxima = lowest;
  I valid[BLOCK / W];
  F x[BLOCK / W];
  PM_UNROLL for (int v = 0; v < BLOCK / W; ++v) {
    const I lane = lane_index() + splat_int(v * W);
    valid[v] = (lane >= splat_int((int32_t)a)) & (lane < splat_int((int32_t)b));
    x[v] = select(valid[v], load(scores + v * W), lowest);
    maxima = max(maxima, x[v]);
  }
  const float block_maximum = max_lanes(maxima);
  const float old = task->maximum[index];
  const float now = old > block_maximum ? old : block_maximum;
  F sums = F{};
  PM_UNROLL for (int v = 0; v < BLOCK / W; ++v) {
    const F weight = select(valid[v], exp(x[v] - splat(now)), F{});
    store(scores + v * W, weight);
    sums = sums + weight;
  }
  const F scale = exp(splat(old - now));
  task->maximum[index] = now;
  task->sum[index] = task->sum[index] * scale[0] + sum_lanes(sums);
  if (scale[0] == 1.0f) return;
  float* out = task->out + index * task->dp;
  for (int64_t i = 0; i < task->dp; i += W) store(out + i, load(out + i) * scale);
}

void add_values(Task* task, int64_t index, int64_t queries, int64_t a, int64_t b) {
  if (a >= b) return;
  const int64_t dp = task->dp;
  for (int64_t offset = 0; offset < dp; offset += CHUNK * W) {
    const int64_t vectors = (dp - offset) / W < CHUNK ? (dp - offset) / W : CHUNK;
    VALUE_TILES[queries - 1][vectors - 1](task->scores + index * BLOCK, task->v_rows, offset, a,
                                          b, task->out + index * dp + offset, dp);
  }
}

// What all queries of the tile may see goes through one tile; the ragged ends one query at a
// time, in the order of positions.
void add_values_tile(Task* task, int64_t index, int64_t queries) {
  int64_t a = 0, b = BLOCK;
  for (int64_t i = index; i < index + queries; ++i) {
    a = a > task->begin[i] ? a : task->begin[i];
    b = b < task->end[i] ? b : task->end[i];
  }
  if (a >= b) {
    for (int64_t i = index; i < index + queries; ++i)
      add_values(task, i, 1, task->begin[i], task->end[i]);
    return;
  }
  for (int64_t i = index; i < index + queries; ++i) add_values(task, i, 1, task->begin[i], a);
  add_values(task, index, queries, a, b);
  for (int64_t i = index; i < index + queries; ++i) add_values(task, i, 1, b, task->end[i]);
}

// The queries first_query .. last_query against the gathered block.
void attend_block(Task* task, int64_t first_query, int64_t last_query, int64_t first,
                  int64_t count, int64_t window) {
  for (int64_t i = first_query; i < last_query; ++i) {
    const int64_t position = task->position[i];
    const int64_t oldest = window > 0 && position >= window ? position - window + 1 : 0;
    task->begin[i] = oldest > first ? oldest - first : 0;
    task->end[i] = position - first + 1 < BLOCK ? position - first + 1 : BLOCK;
    if (task->begin[i] >= task->end[i]) task->begin[i] = task->end[i] = 0;
  }
  for (int64_t i = first_query; i < last_query; i += QUERIES) {
    const int64_t queries = std::min<int64_t>(last_query - i, QUERIES);
    for (int64_t c = 0; c < count; c += CHUNK * W)
      SCORE_TILES[queries - 1](task->q + i * task->d, task->d, task->kt + c,
                               task->scores + i * BLOCK + c);
    for (int64_t j = i; j < i + queries; ++j) softmax_block(task, j);
    add_values_tile(task, i, queries);
  }
}

}  // namespace

AttentionPlan::AttentionPlan(const PmBatch* batch, int64_t num_heads, int64_t num_kv_heads,
                             int64_t page_size, int64_t window, int num_threads)
    : batch_(batch), num_heads_(num_heads), group_(num_heads / num_kv_heads) {
  cut_rows(page_size, window);
  const int64_t wanted = 2 * num_threads;  // pieces, so that no member is left alone with one
  // Rows of different sequences join one task when they read the same first block.
  const int64_t pieces = (int64_t)runs_.size() * num_kv_heads;
  const int64_t joined_runs = std::max<int64_t>(1, pieces / wanted);
  for (size_t r = 0; r < runs_.size(); ++r) {
    const Run& run = runs_[r];
    if (!tasks_.empty()) {
      Joined& last = tasks_.back();
      const int64_t rows = last.rows + run.end - run.begin;
      if ((int64_t)(r - last.first) < joined_runs && rows * group_ <= TASK_QUERIES &&
          is_same_block(runs_[last.first], run, run.lowest / BLOCK * BLOCK)) {
        last.last = r + 1;
        last.rows = rows;
        continue;
      }
    }
    tasks_.push_back({r, r + 1, run.end - run.begin});
  }
  // Late rows see most positions: start with them.
  std::stable_sort(tasks_.begin(), tasks_.end(), [this](const Joined& a, const Joined& b) {
    return runs_[a.first].highest > runs_[b.first].highest;
  });
  // Few pieces: cut the heads of a group apart too, at the price of transposing K again.
  const int64_t made = (int64_t)tasks_.size() * num_kv_heads;
  const int64_t cuts = made ? (wanted + made - 1) / made : 1;
  heads_per_task_ = std::max<int64_t>(1, (group_ + cuts - 1) / cuts);
  head_runs_ = num_kv_heads * ((group_ + heads_per_task_ - 1) / heads_per_task_);
  for (const Joined& task : tasks_) max_rows_ = std::max(max_rows_, task.rows);
}

// Runs of rows of one sequence, those of sequences with equal beginnings side by side.
void AttentionPlan::cut_rows(int64_t page_size, int64_t window) {
  page_size_ = page_size;
  const int64_t most = std::max<int64_t>(1, TASK_QUERIES / group_);
  for (int64_t b = 0; b < batch_->num_sequences; ++b) {
    const int64_t end = batch_->qo_indptr[b + 1];
    for (int64_t row = batch_->qo_indptr[b]; row < end; row += most) {
      Run run{b, row, std::min(row + most, end), std::numeric_limits<int64_t>::max(), 0};
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

// Whether both runs read the block, from the same pages.
bool AttentionPlan::is_same_block(const Run& a, const Run& b, int64_t first) const {
  for (const Run* run : {&a, &b})
    if (first > run->highest || first + BLOCK <= run->lowest) return false;
  const int64_t page = first / page_size_;
  const auto slice_end = [&](const Run& run) {
    const int64_t last = std::min(run.highest, first + BLOCK - 1) / page_size_;
    return last + 1;
  };
  const int64_t end = slice_end(a);
  return end == slice_end(b) && std::equal(pages(a) + page, pages(a) + end, pages(b) + page);
}

int64_t AttentionPlan::scratch_floats(int64_t head_dim) const {
  return task_floats(max_rows_ * heads_per_task_, head_dim);
}

void AttentionPlan::run(const AttentionInput& in, int64_t index, float* scratch) const {
  const Joined& joined = tasks_[(size_t)(index / head_runs_)];
  const int64_t per_group = head_runs_ / in.num_kv_heads;
  const int64_t kv_head = index % head_runs_ / per_group;
  const int64_t head = kv_head * group_ + index % per_group * heads_per_task_;
  const int64_t heads = std::min(heads_per_task_, (kv_head + 1) * group_ - head);
  const int64_t d = in.head_dim;
  Task task;
  place(&task, joined.rows * heads, d, scratch);

  const float scale = 1.0f / std::sqrt((float)d);
  int64_t lowest = std::numeric_limits<int64_t>::max(), highest = 0, i = 0;
  for (size_t r = joined.first; r < joined.last; ++r) {
    lowest = std::min(lowest, runs_[r].lowest);
    highest = std::max(highest, runs_[r].highest);
    for (int64_t row = runs_[r].begin; row < runs_[r].end; ++row)
      for (int64_t h = head; h < head + heads; ++h, ++i) {
        const float* q = in.q + row * in.q_stride + h * d;
        for (int64_t j = 0; j < d; ++j) task.q[i * d + j] = q[j] * scale;
        task.position[i] = batch_->positions[row];
        task.maximum[i] = -std::numeric_limits<float>::infinity();
        task.sum[i] = 0.0f;
      }
  }
  for (int64_t first = lowest / BLOCK * BLOCK; first <= highest; first += BLOCK)
    run_block(in, joined, &task, kv_head, heads, first);
  i = 0;
  for (size_t r = joined.first; r < joined.last; ++r)
    for (int64_t row = runs_[r].begin; row < runs_[r].end; ++row)
      for (int64_t h = head; h < head + heads; ++h, ++i) {
        float* out = in.out + (row * num_heads_ + h) * d;
        const float inverse = 1.0f / task.sum[i];
        for (int64_t j = 0; j < d; ++j) out[j] = task.out[i * task.dp + j] * inverse;
      }
}

// One block for every run of the task that reads it: neighbours with equal pages together.
void AttentionPlan::run_block(const AttentionInput& in, const Joined& joined, Task* task,
                              int64_t kv_head, int64_t heads, int64_t first) const {
  int64_t query = 0;
  for (size_t r = joined.first; r < joined.last;) {
    const Run& leader = runs_[r];
    int64_t end = query + (leader.end - leader.begin) * heads, highest = leader.highest;
    size_t next = r + 1;
    for (; next < joined.last && is_same_block(leader, runs_[next], first); ++next) {
      end += (runs_[next].end - runs_[next].begin) * heads;
      highest = std::max(highest, runs_[next].highest);
    }
    if (first <= leader.highest && first + BLOCK > leader.lowest) {
      const int64_t count = std::min(highest + 1 - first, BLOCK);
      const int64_t after = std::min(leader.highest + 1 - first - BLOCK, BLOCK);
      prefetch_block(in.v_pages, in, pages(leader), kv_head, first, count);
      if (after > 0)
        prefetch_block(in.k_pages, in, pages(leader), kv_head, first + BLOCK, after);
      gather_block(task, in, pages(leader), kv_head, first, count);
      attend_block(task, query, end, first, count, in.window);
    }
    query = end;
    r = next;
  }
}

}  // namespace pm
