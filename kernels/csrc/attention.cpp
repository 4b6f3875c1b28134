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
// K of a block is transposed once, so that positions lie in lanes, and serves all queries of the
// task that read the same pages there: the rows and heads of one sequence, and sequences that share
// a prefix. Each query keeps its own order, so who shares a task with whom changes no bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace pm {

// The running softmax of one query: weights relative to `maximum`, their sum, and sum * V.
struct Running {
  float maximum, sum;
  float* out;  // [Dp]
};

// The state of one task; arrays lie in the thread's scratch.
struct Task {
  int64_t d, dp;
  float* q;         // [nq, D], scaled
  float* kt;        // [D, BLOCK]
  float* scores;    // [nq, BLOCK]
  float* out;       // [nq, Dp] of the span
  float* total;     // [nq, Dp]
  float* values;    // [BLOCK, Dp], used when D is no multiple of W
  float* zeros;     // [Dp]
  float* maximum;   // [nq] of the span
  float* sum;       // [nq]
  float* total_maximum;  // [nq]
  float* total_sum;      // [nq]
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
  const int64_t floats = num_queries * d + d * BLOCK + num_queries * BLOCK +
                         2 * num_queries * dp + BLOCK * dp + dp + 4 * num_queries +
                         6 * num_queries;
  return (floats + 63) / 64 * 64 + 64;
}

void empty(float* maximum, float* sum, float* out, int64_t num_queries, int64_t dp) {
  std::fill_n(maximum, num_queries, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, num_queries, 0.0f);
  std::fill_n(out, num_queries * dp, 0.0f);
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
  task->total = task->out + num_queries * dp;
  task->values = task->total + num_queries * dp;
  task->zeros = task->values + BLOCK * dp;
  task->q = task->zeros + dp;
  task->maximum = task->q + num_queries * d;
  task->sum = task->maximum + num_queries;
  task->total_maximum = task->sum + num_queries;
  task->total_sum = task->total_maximum + num_queries;
  std::fill_n(task->zeros, dp, 0.0f);
  empty(task->maximum, task->sum, task->out, num_queries, dp);
  empty(task->total_maximum, task->total_sum, task->total, num_queries, dp);
}

// Asks for the block's rows ahead of time: rows of one head lie apart, so the hardware does not
// guess them.
void prefetch_block(const float* rows, const AttentionInput& in, const int32_t* pages,
                    int64_t kv_head, int64_t num_heads, int64_t first, int64_t count) {
  const int64_t d = in.head_dim, width = in.num_kv_heads * d;
  int64_t page = first / in.page_size, offset = first % in.page_size, i = 0;
  while (i < count) {
    const float* at = rows + ((int64_t)pages[page] * in.page_size + offset) * width + kv_head * d;
    const int64_t end = std::min(count, i + in.page_size - offset);
    for (; i < end; ++i, at += width)
      for (int64_t j = 0; j < num_heads * d; j += 16) __builtin_prefetch(at + j, 0, 2);
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

// total = total and part together. A part without positions has the sum 0 and changes nothing.
void merge(Running* total, const Running& part, int64_t dp) {
  if (part.sum == 0.0f) return;
  const float now = total->maximum > part.maximum ? total->maximum : part.maximum;
  const F keep = exp(splat(total->maximum - now)), take = exp(splat(part.maximum - now));
  total->maximum = now;
  total->sum = total->sum * keep[0] + part.sum * take[0];
  for (int64_t i = 0; i < dp; i += W)
    store(total->out + i, fma(load(total->out + i), keep, load(part.out + i) * take));
}

void finish_span(Task* task, int64_t num_queries) {
  const int64_t dp = task->dp;
  for (int64_t i = 0; i < num_queries; ++i) {
    Running total{task->total_maximum[i], task->total_sum[i], task->total + i * dp};
    merge(&total, {task->maximum[i], task->sum[i], task->out + i * dp}, dp);
    task->total_maximum[i] = total.maximum;
    task->total_sum[i] = total.sum;
  }
  empty(task->maximum, task->sum, task->out, num_queries, dp);
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

int64_t AttentionPlan::scratch_floats() const {
  return task_floats(max_rows_ * kv_heads_per_piece_ * group_, dp_);
}

void AttentionPlan::run(const AttentionInput& in, int64_t index, float* scratch) {
  const Piece& piece = pieces_[(size_t)(index / head_runs_)];
  const Joined& joined = tasks_[piece.task];
  const int64_t kv_head = index % head_runs_ * kv_heads_per_piece_;
  const int64_t num_queries = joined.rows * kv_heads_per_piece_ * group_;
  Task task;
  place(&task, num_queries, in.head_dim, scratch);
  const float scale = 1.0f / std::sqrt((float)in.head_dim);
  for_queries(joined, kv_head, [&](int64_t i, int64_t row, int64_t, int64_t head) {
    const float* q = in.q + row * in.q_stride + head * in.head_dim;
    for (int64_t j = 0; j < in.head_dim; ++j) task.q[i * in.head_dim + j] = q[j] * scale;
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
  float* out = in.out + (row * num_heads_ + head) * in.head_dim;
  const float inverse = 1.0f / result.sum;
  for (int64_t j = 0; j < in.head_dim; ++j) out[j] = result.out[j] * inverse;
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
      const int64_t count = std::min(highest + 1 - first, BLOCK);
      const int64_t after = std::min(leader.highest + 1 - first - BLOCK, BLOCK);
      if (kv_head % kv_heads_per_piece_ == 0) {
        prefetch_block(in.v_pages, in, pages(leader), kv_head, kv_heads_per_piece_, first, count);
        if (after > 0)
          prefetch_block(in.k_pages, in, pages(leader), kv_head, kv_heads_per_piece_,
                         first + BLOCK, after);
      }
      gather_block(task, in, pages(leader), kv_head, first, count);
      attend_block(task, query, end, first, count, in.window);
    }
    query = end;
    r = next;
  }
}

}  // namespace pm
