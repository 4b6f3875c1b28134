// Blocks of a pool of floats: K and V widened exactly, arithmetic in float32.
//
// K of a block is transposed once, so that positions lie in lanes, and serves all queries of the
// task that read the same pages there.
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_block.h"

namespace pm {
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

// Scores of query `index` in this block into weights; rescales its output row.
void softmax_block(Task* task, int64_t index) {
  const int64_t a = task->begin[index], b = task->end[index];
  if (a >= b) return;
  float* scores = task->floats.scores + index * BLOCK;
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
    VALUE_TILES[queries - 1][vectors - 1](task->floats.scores + index * BLOCK, task->floats.v_rows, offset, a,
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

// Rows of 16-bit numbers widened, or rows padded with zeros to whole vectors.
void widen(int64_t kind, const unsigned char* row, int64_t d, int64_t dp, float* out) {
  if (kind == PM_KV_F32) {
    std::memcpy(out, row, (size_t)d * sizeof(float));
  } else {
    int64_t j = 0;
    for (; j + W <= d; j += W) {
      const uint16_t* at = (const uint16_t*)row + j;
      store(out + j, kind == PM_KV_BF16 ? load_bf16(at) : load_half(at));
    }
    uint16_t rest[W] = {};
    std::memcpy(rest, row + 2 * j, (size_t)(d - j) * 2);
    if (j < d) store(out + j, kind == PM_KV_BF16 ? load_bf16(rest) : load_half(rest));
  }
  for (int64_t j = d; j < dp; ++j) out[j] = 0.0f;
}

}  // namespace

void set_query_float(Task* task, int64_t index, const float* q) {
  const float scale = 1.0f / std::sqrt((float)task->d);
  for (int64_t j = 0; j < task->d; ++j) task->floats.q[index * task->d + j] = q[j] * scale;
}

// Positions past `count` read zeros (they are masked anyway).
void gather_float(Task* task, const AttentionInput& in, const BlockPlace& place) {
  const int64_t d = task->d, dp = task->dp, stride = in.kv.row_stride();
  FloatBlock& b = task->floats;
  const bool is_wide = in.kv.kind == PM_KV_F32;
  for_page_runs(in.kv.page_size, place, [&](int64_t i, int64_t page, int64_t token, int64_t n) {
    int64_t at = page * in.kv.page_bytes() + in.kv.row_offset(place.kv_head, token);
    for (const int64_t end = i + n; i < end; ++i, at += stride) {
      b.k_rows[i] = (const float*)(in.k_pages + at);
      b.v_rows[i] = (const float*)(in.v_pages + at);
      if (!is_wide) {
        widen(in.kv.kind, in.k_pages + at, d, dp, b.k_wide + i * dp);
        b.k_rows[i] = b.k_wide + i * dp;
      }
      if (!is_wide || dp != d) {
        widen(in.kv.kind, in.v_pages + at, d, dp, b.v_wide + i * dp);
        b.v_rows[i] = b.v_wide + i * dp;
      }
    }
  });
  for (int64_t i = place.count; i < BLOCK; ++i) b.k_rows[i] = b.v_rows[i] = b.zeros;
  for (int64_t i = 0; i < place.count; i += W) {
    int64_t column = 0;
    for (; column + W <= d; column += W)
      transpose(b.k_rows + i, column, b.kt + column * BLOCK + i, BLOCK);
    for (; column < d; ++column)
      for (int64_t j = i; j < i + W; ++j) b.kt[column * BLOCK + j] = b.k_rows[j][column];
  }
}

void attend_float(Task* task, int64_t first, int64_t last, int64_t count) {
  for (int64_t i = first; i < last; i += QUERIES) {
    const int64_t queries = std::min<int64_t>(last - i, QUERIES);
    for (int64_t c = 0; c < count; c += CHUNK * W)
      SCORE_TILES[queries - 1](task->floats.q + i * task->d, task->d, task->floats.kt + c,
                               task->floats.scores + i * BLOCK + c);
    for (int64_t j = i; j < i + queries; ++j) softmax_block(task, j);
    add_values_tile(task, i, queries);
  }
}

}  // namespace pm
