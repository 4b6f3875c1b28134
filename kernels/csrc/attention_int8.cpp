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
constexpr int RUNS = BLOCK / RUN;
#if PM_W == 16
constexpr int QUERIES = 6;  // queries per tile: 6 x 4 accumulators of 32 registers
#else
constexpr int QUERIES = 3;  // 3 x 4 of 16
#endif
constexpr int GROUP_QUERIES = W / QUERIES * QUERIES;  // a lane per query
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOWEST = -std::numeric_limits<float>::max();

// What one group of queries keeps between the steps of a block. The arrays of W have one lane per
// query, so that what is computed once per query and block is computed for all of them at once.
struct Group {
  float x[GROUP_QUERIES][BLOCK];  // scores, but for q_scale; then weights
  uint8_t weights[GROUP_QUERIES][BLOCK];
  float maxima[W][W];  // of x, per lane; then of the weights
  float sums[W][W];    // of p, per lane
  float factor[W] = {}, shift[W] = {};  // p = 2^(x * factor + shift)
  float inverse[W] = {};  // WEIGHT_LIMIT / the largest weight
  float unit[W] = {};     // what an integer weight of 1 stands for
  float keep[W] = {};     // the factor of the output so far
};

// x = K scale * (start + the dot product of the query and K) of CHUNK vectors of positions from
// vector `from` on, for the R queries that begin at q; and the maxima of x.
template <int R>
void score_tile(const IntBlock& block, int64_t words, int64_t query, int from, Group* group,
                int64_t row) {
  const int32_t* q = block.q + query * words;
  const int32_t *k[CHUNK], *next[CHUNK];
  I acc[R][CHUNK];
  PM_UNROLL for (int c = 0; c < CHUNK; ++c) {
    const int run = (from + c) * W / RUN, position = (from + c) * W % RUN;
    k[c] = block.runs.k[run] + position;
    next[c] = block.next.k[run] + position;
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = splat_int(block.q_start[query + r]);
  const I flip = splat_int((int32_t)(SIGNED_OFFSET * 0x01010101u));  // b + 128 is b ^ 128
  for (int64_t j = 0, at = 0; j < words; ++j, at += block.k_stride) {
    I w[CHUNK];
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) {
      if (block.has_next && c * W % RUN == 0) prefetch(next[c] + at);
      w[c] = load_int(k[c] + at) ^ flip;
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I x = splat_int(q[r * words + j]);
      PM_UNROLL for (int c = 0; c < CHUNK; ++c) acc[r][c] = dot4_signed(acc[r][c], w[c], x);
    }
  }
  F scale[CHUNK];
  PM_UNROLL for (int c = 0; c < CHUNK; ++c) scale[c] = load(block.k_scale + (from + c) * W);
  PM_UNROLL for (int r = 0; r < R; ++r) {
    F maxima = from == 0 ? splat(LOWEST) : load(group->maxima[row + r]);
    PM_UNROLL for (int c = 0; c < CHUNK; ++c) {
      const F x = to_float(acc[r][c]) * scale[c];
      store(group->x[row + r] + (from + c) * W, x);
      maxima = max(maxima, x);
    }
    store(group->maxima[row + r], maxima);
  }
}

// out[r][..] = keep[r] * out[r][..] + unit[r] * sum of weights[r][i] * V[i][..], for C vectors from
// `offset` on, over `runs` runs of positions.
template <int R, int C>
void value_tile(const Group& group, int64_t row, const IntBlock& block, int64_t offset,
                int64_t runs, int64_t dp, float* out) {
  I acc[R][C];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = I{};
  for (int64_t run = 0; run < runs; ++run) {
    const int32_t *at = block.runs.v[run] + offset, *next = block.next.v[run] + offset;
    for (int64_t s = 0; s < RUN / 4; ++s, at += block.v_stride, next += block.v_stride) {
      I v[C];
      PM_UNROLL for (int c = 0; c < C; ++c) {
        if (block.has_next && c * W % RUN == 0) prefetch(next + c * W);
        v[c] = load_int(at + c * W);
      }
      PM_UNROLL for (int r = 0; r < R; ++r) {
        int32_t word;
        std::memcpy(&word, group.weights[row + r] + run * RUN + s * 4, 4);
        const I x = splat_int(word);
        PM_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = dot4_unsigned(acc[r][c], x, v[c]);
      }
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r) {
    const F unit = splat(group.unit[row + r]), keep = splat(group.keep[row + r]);
    PM_UNROLL for (int c = 0; c < C; ++c) {
      float* to = out + r * dp + offset + c * W;
      store(to, fma(to_float(acc[r][c]), unit, load(to) * keep));
    }
  }
}

typedef void (*ScoreTile)(const IntBlock&, int64_t, int64_t, int, Group*, int64_t);
typedef void (*ValueTile)(const Group&, int64_t, const IntBlock&, int64_t, int64_t, int64_t,
                          float*);
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
struct CoarseExp2 {
  F lowest = in_register(splat(-126.0f));
  F magic = in_register(splat(12582912.0f + 127.0f));  // 1.5 * 2^23: the exponent in the low bits
  F cubic = in_register(splat(0.05500897020101547f));
  F square = in_register(splat(0.24221105873584747f));
  F linear = in_register(splat(0.693282961845398f));
  F one = in_register(splat(1.0f));

  PM_INLINE F operator()(F x) const {
    const F y = max(lowest, x);
    const F t = y + magic;
    const F r = y - (t - magic);
    const F p = fma(fma(fma(cubic, r, square), r, linear), r, one);
    return p * (F)((I)t << 23);
  }
};

struct Visible {
  I begin, end;
  template <bool WHOLE>
  PM_INLINE F only(int v, F x, F other) const {
    if (WHOLE) return x;
    const I lane = lane_index() + splat_int(v * W);
    return select((lane >= begin) & (lane < end), x, other);
  }
};

// The maxima of a query that sees a part of the block, and no other scores.
void hide_scores(Visible visible, Group* group, int64_t row) {
  F maxima = splat(LOWEST);
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    float* at = group->x[row] + v * W;
    const F x = visible.only<false>(v, load(at), splat(LOWEST));
    store(at, x);
    maxima = max(maxima, x);
  }
  store(group->maxima[row], maxima);
}

// The scores of one query into weights. A weight stands for the product of the softmax weight p
// and the scale of V; the sum is that of p itself, so that a row of V with a small scale, whose
// weight is rounded the most, counts with its true share.
template <bool WHOLE>
PM_INLINE void weigh(const float* v_scale, CoarseExp2 exp2, Visible visible, Group* group,
                     int64_t row) {
  const F factor = splat(group->factor[row]), shift = splat(group->shift[row]);
  F largest = F{}, sums = F{};
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const F p = exp2(fma(load(group->x[row] + v * W), factor, shift));
    const F weight = visible.only<WHOLE>(v, p * load(v_scale + v * W), F{});
    store(group->x[row] + v * W, weight);
    sums = sums + visible.only<WHOLE>(v, p, F{});
    largest = max(largest, weight);
  }
  store(group->maxima[row], largest);
  store(group->sums[row], sums);
}

// The weights of one query as integers.
PM_INLINE void round_weights(Group* group, int64_t row) {
  const F inverse = splat(group->inverse[row]);
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: the integer is the low byte
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const F weight = fma(load(group->x[row] + v * W), inverse, magic);
    store_bytes((int8_t*)group->weights[row] + v * W, (I)weight);
  }
}

// Queries first .. first + queries: scores into integer weights; updates the running softmax.
void softmax_group(Task* task, int64_t first, int64_t queries, Group* group) {
  const IntBlock& block = task->ints;
  const int64_t* begin = task->begin + first;
  const int64_t* end = task->end + first;
  const auto visible = [&](int64_t r) {
    return Visible{splat_int((int32_t)begin[r]), splat_int((int32_t)end[r])};
  };
  const auto is_whole = [&](int64_t r) { return begin[r] == 0 && end[r] == BLOCK; };
  for (int64_t r = 0; r < queries; ++r)
    if (!is_whole(r)) hide_scores(visible(r), group, r);
  const F q_scale = load_first(block.q_scale + first, queries);
  const F old = load_first(task->maximum + first, queries);
  const F now = max(old, max_rows(group->maxima, queries) * q_scale);
  store(group->factor, q_scale * splat(LOG2_E));
  store(group->shift, -now * splat(LOG2_E));
  const F keep = exp(old - now);
  store(group->keep, keep);
  const CoarseExp2 exp2;
  for (int64_t r = 0; r < queries; ++r) {
    if (is_whole(r))
      weigh<true>(block.v_scale, exp2, visible(r), group, r);
    else
      weigh<false>(block.v_scale, exp2, visible(r), group, r);
  }
  const F top = max_rows(group->maxima, queries), limit = splat(WEIGHT_LIMIT);
  const I is_some = top > splat(1e-30f);  // else limit / top could overflow
  store(group->inverse, select(is_some, limit / top, F{}));
  store(group->unit, select(is_some, top / limit, F{}));
  const F sum = load_first(task->sum + first, queries) * keep + sum_rows(group->sums, queries);
  for (int64_t r = 0; r < queries; ++r) round_weights(group, r);
  bool all = true;
  for (int64_t r = 0; r < queries; ++r) all &= begin[r] < end[r];
  if (all) {
    store_first(task->maximum + first, now, queries);
    store_first(task->sum + first, sum, queries);
    return;
  }
  for (int64_t r = 0; r < queries; ++r) {
    if (begin[r] < end[r]) {
      task->maximum[first + r] = now[r];
      task->sum[first + r] = sum[r];
    } else {
      group->unit[r] = 0.0f;
      group->keep[r] = 1.0f;
    }
  }
}

// Rows of the block's K or V as the pool has them, or padded with zeros to whole vectors of words.
void find_rows(Task* task, const AttentionInput& in, const unsigned char* side,
               const BlockPlace& place, const unsigned char** rows, float* scales) {
  const int64_t d = task->d, width = padded(task->words) * 4;
  for_page_runs(in.kv.page_size, place, [&](int64_t i, int64_t page, int64_t token, int64_t n) {
    const unsigned char* at = side + page * in.kv.page_bytes();
    const unsigned char* from = at + in.kv.scale_offset(place.kv_head, token);
    std::memcpy(scales + i, from, (size_t)n * sizeof(float));
    at += in.kv.row_offset(place.kv_head, token);
    for (const int64_t end = i + n; i < end; ++i, at += d) rows[i] = at;
  });
  for (int64_t i = 0; i < place.count && width != d; ++i) {
    unsigned char* row = task->ints.rows + i * width;
    std::memcpy(row, rows[i], (size_t)d);
    std::memset(row + d, 0, (size_t)(width - d));
    rows[i] = row;
  }
  for (int64_t i = place.count; i < BLOCK; ++i) rows[i] = rows[0];  // weight 0
}

// The bytes of the block from pages that are not packed.
void gather_rows(Task* task, const AttentionInput& in, const BlockPlace& place) {
  IntBlock& b = task->ints;
  const unsigned char* rows[BLOCK];
  find_rows(task, in, in.k_pages, place, rows, b.k_scale);
  for (int64_t i = 0; i < place.count; i += W)
    for (int64_t j = 0; j < task->words; j += W)
      transpose((const float* const*)rows + i, j, (float*)b.kt + j * BLOCK + i, BLOCK);
  find_rows(task, in, in.v_pages, place, rows, b.v_scale);
  for (int64_t i = 0; i < place.count; i += 4)
    for (int64_t j = 0; j < task->dp; j += W)
      interleave(rows + i, j, b.vt + i / 4 * task->dp + j);
  b.k_stride = BLOCK;
  b.v_stride = task->dp;
  for (int64_t r = 0; r < RUNS; ++r) {
    b.runs.k[r] = b.kt + r * RUN;
    b.runs.v[r] = b.vt + r * RUN / 4 * task->dp;
  }
  b.next = b.runs;
  b.has_next = false;
}

// Packed pages are read where they lie. visit(i, scales of K, of V): of the RUN positions from i.
template <typename Visit>
PM_INLINE void find_packed(const AttentionInput& in, const BlockPlace& place, IntRuns* runs,
                           Visit visit) {
  const KvLayout& kv = in.kv;
  const int64_t head = kv.row_offset(place.kv_head, 0), page_bytes = kv.page_bytes();
  for_page_runs(kv.page_size, place, [&](int64_t i, int64_t page, int64_t token, int64_t n) {
    const unsigned char* k_page = in.k_pages + page * page_bytes;
    const unsigned char* v_page = in.v_pages + page * page_bytes;
    for (const int64_t end = i + n; i < end; i += RUN, token += RUN) {
      runs->k[i / RUN] = (const int32_t*)(k_page + head) + token;
      runs->v[i / RUN] = (const int32_t*)(v_page + head + token * kv.head_dim);
      const int64_t scales = kv.scale_offset(place.kv_head, token);
      visit(i, k_page + scales, v_page + scales);
    }
  });
}

void gather_packed(Task* task, const AttentionInput& in, const BlockPlace& place,
                   const BlockPlace& next) {
  IntBlock& b = task->ints;
  b.k_stride = in.kv.page_size;
  b.v_stride = task->d;
  find_packed(in, place, &b.runs,
              [&](int64_t i, const unsigned char* k_scales, const unsigned char* v_scales) {
    std::memcpy(b.k_scale + i, k_scales, RUN * sizeof(float));
    std::memcpy(b.v_scale + i, v_scales, RUN * sizeof(float));
  });
  for (int64_t r = (place.count + RUN - 1) / RUN; r < RUNS; ++r)
    b.runs.k[r] = b.runs.v[r] = b.runs.k[0];  // seen by no query
  b.next = b.runs;
  b.has_next = next.count > 0;
  find_packed(in, next, &b.next, [](int64_t, const unsigned char* k, const unsigned char* v) {
    prefetch(k);
    prefetch(v);
  });
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

void gather_int8(Task* task, const AttentionInput& in, const BlockPlace& place,
                 const BlockPlace& next) {
  IntBlock& b = task->ints;
  if (in.kv.is_packed())
    gather_packed(task, in, place, next);
  else
    gather_rows(task, in, place);
  // A scale of V that is not a number must show in the rows that see it.
  PM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    const F k_scale = load(b.k_scale + v * W), v_scale = load(b.v_scale + v * W);
    store(b.k_scale + v * W, select(v_scale == v_scale, k_scale, v_scale));
  }
}

void attend_int8(Task* task, int64_t first, int64_t last, int64_t count) {
  const IntBlock& b = task->ints;
  const int64_t dp = task->dp, runs = (count + RUN - 1) / RUN;
  alignas(64) Group group;
  for (int64_t i = first; i < last; i += GROUP_QUERIES) {
    const int64_t queries = std::min<int64_t>(last - i, GROUP_QUERIES);
    for (int64_t r = 0; r < queries; r += QUERIES)
      for (int v = 0; v < VECTORS && v * W < count; v += CHUNK)
        SCORE_TILES[std::min<int64_t>(queries - r, QUERIES) - 1](b, task->words, i + r, v, &group,
                                                                 r);
    softmax_group(task, i, queries, &group);
    for (int64_t r = 0; r < queries; r += QUERIES)
      for (int64_t offset = 0; offset < dp; offset += CHUNK * W) {
        const int64_t vectors = std::min<int64_t>((dp - offset) / W, CHUNK);
        VALUE_TILES[std::min<int64_t>(queries - r, QUERIES) - 1][vectors - 1](
            group, r, b, offset, runs, dp, task->out + (i + r) * dp);
      }
  }
}

}  // namespace pm
