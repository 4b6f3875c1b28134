// Blocks of a PM_KV_INT8 pool: exact integer dot products, one float per score and one fused
// multiply-add per output and block.
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_block.h"

namespace pm {
namespace {

constexpr int CHUNK = 4;  // vectors per tile
constexpr int VECTORS = BLOCK / W;
constexpr int WORDS = BLOCK / 4;  // of weights of a block
#if PM_W == 16
constexpr int QUERIES = 6;  // queries per tile: 6 x 4 accumulators of 32 registers
#else
constexpr int QUERIES = 3;  // 3 x 4 of 16
#endif
constexpr float LOG2_E = 1.44269504088896341f;

// What one group of queries keeps between the steps of a block. The arrays of W have one lane per
// query, so that what is computed once per query and block is computed for all of them at once.
struct Group {
  int32_t scores[QUERIES][BLOCK];
  float x[QUERIES][BLOCK];          // scores as numbers, but for q_scale; then weights
  int32_t weights[QUERIES][WORDS];  // four bytes each: positions i, i + 16, i + 32, i + 48
  float maximum[W] = {};  // of the scores, with q_scale
  float factor[W] = {}, shift[W] = {};  // p = 2^(x * factor + shift)
  float top[W] = {};      // the largest weight
  float sum[W] = {};      // of p
  float inverse[W] = {};  // WEIGHT_LIMIT / top
  float unit[W] = {};     // what an integer weight of 1 stands for
  float keep[W] = {};     // the factor of the output so far
};
static_assert(QUERIES <= W, "a lane per query");

// scores[r][i] = start[r] + the dot product of q[r] and column i of kt, for CHUNK vectors.
template <int R>
void score_tile(const int32_t* q, int64_t words, const int32_t* start, const int32_t* kt,
                int32_t* scores) {
  I acc[R][CHUNK];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = splat_int(start[r]);
  for (int64_t j = 0; j < words; ++j) {
    I k[CHUNK];
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) k[c] = load_int(kt + j * BLOCK + c * W);
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I x = splat_int(q[r * words + j]);
      PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = dot4_signed(acc[r][c], k[c], x);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) store_int(scores + r * BLOCK + c * W, acc[r][c]);
}

// out[r][..] = keep[r] * out[r][..] + unit[r] * sum of weights[r][i] * V[i][..], for C vectors.
template <int R, int C>
void value_tile(const Group& group, const int32_t* vt, int64_t stride, int64_t steps, float* out) {
  I acc[R][C];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = I{};
  for (int64_t s = 0; s < steps; ++s) {
    I v[C];
    PM_UNROLL for (int c = 0; c < C; ++c) v[c] = load_int(vt + s * stride + c * W);
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I x = splat_int(group.weights[r][s]);
      PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = dot4_unsigned(acc[r][c], x, v[c]);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r) {
    const F unit = splat(group.unit[r]), keep = splat(group.keep[r]);
    PM_UNROLL for (int c = 0; c < C; ++c) {
      float* at = out + r * stride + c * W;
      store(at, fma(to_float(acc[r][c]), unit, load(at) * keep));
    }
  }
}

typedef void (*ScoreTile)(const int32_t*, int64_t, const int32_t*, const int32_t*, int32_t*);
typedef void (*ValueTile)(const Group&, const int32_t*, int64_t, int64_t, float*);
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

// 2^x to 1e-4 of its value, enough for weights of 8 bits; x <= 0, below -126 it is 2^-126. NaN
// stays NaN.
PM_INLINE F exp2_coarse(F x) {
  const F magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23: the exponent lies in the low bits
  const F y = max(splat(-126.0f), x);
  const F t = y + magic;
  const F r = y - (t - magic);
  F p = fma(splat(0.05500897020101547f), r, splat(0.24221105873584747f));
  p = fma(p, r, splat(0.693282961845398f));
  p = fma(p, r, splat(1.0f));
  return p * (F)((I)t << 23);
}

struct Visible {
  I begin, end;
  template <bool WHOLE>
  PM_INLINE F only(int v, F x, F other) const {
    if (WHOLE) return x;
    const I lane = lane_index() + splat_int(v * W);
    return select((lane >= begin) & (lane < end), x, other);
  }
};

// The scores of one query as numbers, and their maximum.
template <bool WHOLE>
void scale_scores(const float* k_scale, Visible visible, Group* group, int64_t row) {
  const F lowest = splat(-std::numeric_limits<float>::max());
  F maxima = lowest;
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const F score = to_float(load_int(group->scores[row] + v * W)) * load(k_scale + v * W);
    const F x = visible.only<WHOLE>(v, score, lowest);
    store(group->x[row] + v * W, x);
    maxima = max(maxima, x);
  }
  group->maximum[row] = max_lanes(maxima);
}

// The scores of one query into weights. A weight stands for the product of the softmax weight p
// and the scale of V; the sum is that of p itself, so that a row of V with a small scale, whose
// weight is rounded the most, counts with its true share.
template <bool WHOLE>
void weigh(const float* v_scale, Visible visible, Group* group, int64_t row) {
  const F factor = splat(group->factor[row]), shift = splat(group->shift[row]);
  F largest = F{}, sums = F{};
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const F p = exp2_coarse(fma(load(group->x[row] + v * W), factor, shift));
    const F weight = visible.only<WHOLE>(v, p * load(v_scale + v * W), F{});
    store(group->x[row] + v * W, weight);
    sums = sums + visible.only<WHOLE>(v, p, F{});
    largest = max(largest, weight);
  }
  group->top[row] = max_lanes(largest);
  group->sum[row] = sum_lanes(sums);
}

// The weights of one query as integers.
void round_weights(Group* group, int64_t row) {
  constexpr int RUN = WORDS / W;  // vectors of words
  const F inverse = splat(group->inverse[row]), magic = splat(12582912.0f);  // 1.5 * 2^23
  PM_UNROLL for (int u = 0; u < RUN; ++u) {
    I words{};
    PM_UNROLL for (int byte = 0; byte < 4; ++byte) {
      const F weight = load(group->x[row] + (byte * RUN + u) * W);
      const I integer = (I)fma(weight, inverse, magic) - splat_int(0x4B400000);
      words |= integer << (8 * byte);
    }
    store_int(group->weights[row] + u * W, words);
  }
}

// Queries first .. first + queries: scores into integer weights; updates the running softmax.
void softmax_group(Task* task, int64_t first, int64_t queries, Group* group) {
  const IntBlock& block = task->ints;
  const auto for_visible = [&](auto whole, auto part) {
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t begin = task->begin[first + r], end = task->end[first + r];
      const Visible visible{splat_int((int32_t)begin), splat_int((int32_t)end)};
      if (begin == 0 && end == BLOCK)
        whole(visible, r);
      else if (begin < end)
        part(visible, r);
    }
  };
  for_visible([&](Visible v, int64_t r) { scale_scores<true>(block.k_scale, v, group, r); },
              [&](Visible v, int64_t r) { scale_scores<false>(block.k_scale, v, group, r); });
  const F q_scale = load_first(block.q_scale + first, queries);
  const F old = load_first(task->maximum + first, queries);
  const F now = max(old, load(group->maximum) * q_scale);
  store(group->maximum, now);
  store(group->factor, q_scale * splat(LOG2_E));
  store(group->shift, -now * splat(LOG2_E));
  store(group->keep, exp(old - now));
  for_visible([&](Visible v, int64_t r) { weigh<true>(block.v_scale, v, group, r); },
              [&](Visible v, int64_t r) { weigh<false>(block.v_scale, v, group, r); });
  const F top = load(group->top), limit = splat(WEIGHT_LIMIT);
  const I is_some = top > splat(1e-30f);  // else limit / top could overflow
  store(group->inverse, select(is_some, limit / top, F{}));
  store(group->unit, select(is_some, top / limit, F{}));
  for (int64_t r = 0; r < queries; ++r) {
    if (task->begin[first + r] < task->end[first + r]) {
      round_weights(group, r);
      task->maximum[first + r] = group->maximum[r];
      task->sum[first + r] = task->sum[first + r] * group->keep[r] + group->sum[r];
    } else {
      group->unit[r] = 0.0f;
      group->keep[r] = 1.0f;
      std::memset(group->weights[r], 0, sizeof group->weights[r]);
    }
  }
}

// Rows of the block's K or V as the pool has them, or padded with zeros to whole vectors of words.
void find_rows(Task* task, const AttentionInput& in, const unsigned char* side,
               const int32_t* pages, int64_t kv_head, int64_t first, int64_t count,
               const unsigned char** rows, float* scales) {
  const int64_t d = task->d, width = padded(task->words) * 4;
  for_page_runs(in.kv.page_size, pages, first, count,
                [&](int64_t i, int64_t page, int64_t token, int64_t n) {
    const unsigned char* at = side + page * in.kv.page_bytes();
    std::memcpy(scales + i, at + in.kv.scale_offset(kv_head, token), (size_t)n * sizeof(float));
    at += in.kv.row_offset(kv_head, token);
    for (const int64_t end = i + n; i < end; ++i, at += d) rows[i] = at;
  });
  for (int64_t i = 0; i < count && width != d; ++i) {
    unsigned char* row = task->ints.rows + i * width;
    std::memcpy(row, rows[i], (size_t)d);
    std::memset(row + d, 0, (size_t)(width - d));
    rows[i] = row;
  }
  for (int64_t i = count; i < BLOCK; ++i) rows[i] = rows[0];  // weight 0
}

}  // namespace

void set_query_int8(Task* task, int64_t index, const float* q) {
  IntBlock& b = task->ints;
  int8_t* integers = (int8_t*)(b.q + index * task->words);
  std::memset(integers, 0, (size_t)task->words * 4);
  b.q_scale[index] = quantise_row(q, task->d, integers) / std::sqrt((float)task->d);
  int32_t sum = 0;
  for (int64_t j = 0; j < task->d; ++j) sum += integers[j];
  b.q_start[index] = -SIGNED_OFFSET * sum;
}

void gather_int8(Task* task, const AttentionInput& in, const int32_t* pages, int64_t kv_head,
                 int64_t first, int64_t count) {
  IntBlock& b = task->ints;
  const unsigned char* rows[BLOCK];
  find_rows(task, in, in.k_pages, pages, kv_head, first, count, rows, b.k_scale);
  const I flip = splat_int((int32_t)(SIGNED_OFFSET * 0x01010101u));  // b + 128 is b ^ 128
  for (int64_t i = 0; i < count; i += W)
    for (int64_t j = 0; j < task->words; j += W)
      transpose((const float* const*)rows + i, j, (float*)b.kt + j * BLOCK + i, BLOCK, flip);
  find_rows(task, in, in.v_pages, pages, kv_head, first, count, rows, b.v_scale);
  for (int64_t s = 0; s < std::min<int64_t>(count, WORDS); ++s) {
    const unsigned char* const four[] = {rows[s], rows[s + 16], rows[s + 32], rows[s + 48]};
    for (int64_t j = 0; j < task->dp; j += W) interleave(four, j, b.vt + s * task->dp + j);
  }
  // A scale of V that is not a number must show in the rows that see it.
  for (int64_t i = 0; i < count; ++i)
    if (b.v_scale[i] != b.v_scale[i]) b.k_scale[i] = b.v_scale[i];
}

void attend_int8(Task* task, int64_t first, int64_t last, int64_t count) {
  const IntBlock& b = task->ints;
  const int64_t dp = task->dp, steps = std::min<int64_t>(count, WORDS);
  alignas(64) Group group;
  for (int64_t i = first; i < last; i += QUERIES) {
    const int64_t queries = std::min<int64_t>(last - i, QUERIES);
    for (int64_t c = 0; c < count; c += CHUNK * W)
      SCORE_TILES[queries - 1](b.q + i * task->words, task->words, b.q_start + i, b.kt + c,
                               group.scores[0] + c);
    softmax_group(task, i, queries, &group);
    for (int64_t offset = 0; offset < dp; offset += CHUNK * W) {
      const int64_t vectors = std::min<int64_t>((dp - offset) / W, CHUNK);
      VALUE_TILES[queries - 1][vectors - 1](group, b.vt + offset, dp, steps,
                                            task->out + i * dp + offset);
    }
  }
}

}  // namespace pm
