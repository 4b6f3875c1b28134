// What one task of attention keeps in its thread's scratch, and the two ways to compute a block of
// positions: in floats (attention_float.cpp) and in integers (attention_int8.cpp).
#pragma once
#include "attention.h"

namespace pm {

// The running softmax of one query: weights relative to `maximum`, their sum, and sum * V.
struct Running {
  float maximum, sum;
  float* out;  // [Dp]
};

// The block of a pool of a float kind.
struct FloatBlock {
  float* q;        // [nq, D], scaled
  float* kt;       // [D, BLOCK]
  float* scores;   // [nq, BLOCK]
  float* k_wide;   // [BLOCK, Dp]: rows of 16-bit pools as floats
  float* v_wide;   // the same; also when D is no multiple of W
  float* zeros;    // [Dp]
  const float* k_rows[BLOCK];
  const float* v_rows[BLOCK];
};

// Up to BLOCK positions of one kv head, from position `first` on, in a sequence's pages.
struct BlockPlace {
  const int32_t* pages;
  int64_t kv_head, first, count;
};

// Of each run of positions of a block: word j of K of position i at j * k_stride + i; V of the
// positions 4 s .. 4 s + 3 at s * v_stride.
struct IntRuns {
  const int32_t* k[BLOCK / RUN];
  const int32_t* v[BLOCK / RUN];
};

// The block of a PM_KV_INT8 pool. Words hold four bytes, of four neighbours in D or in positions.
struct IntBlock {
  int32_t* q;             // [nq, words]
  float* q_scale;         // [nq], with 1 / sqrt(D)
  int32_t* q_start;       // [nq]: where a dot product starts, see SIGNED_OFFSET
  IntRuns runs;
  IntRuns next;           // of the block to ask for ahead of time
  bool has_next;
  int64_t k_stride, v_stride;     // words
  int32_t* kt;            // [words padded to W, BLOCK] where pages are not packed
  int32_t* vt;            // [BLOCK / 4, Dp]
  float* k_scale;         // [BLOCK]
  float* v_scale;         // [BLOCK]
  unsigned char* rows;    // [BLOCK, words padded to W] words
};

// The state of one task.
struct Task {
  int64_t d, dp, words;
  float* out;            // [nq, Dp] of the span
  float* maximum;        // [nq] of the span
  float* sum;            // [nq]
  float* total;          // [nq, Dp]
  float* total_maximum;  // [nq]
  float* total_sum;      // [nq]
  int64_t* position;     // [nq]
  int64_t* begin;        // [nq] visible positions of the block: begin .. end
  int64_t* end;          // [nq]
  FloatBlock floats;
  IntBlock ints;
};

// Query `index` of the task: q [D].
void set_query_float(Task* task, int64_t index, const float* q);
void set_query_int8(Task* task, int64_t index, const float* q);
// K and V of the block; asks for those of the next one, where few queries read this one.
void gather_float(Task* task, const AttentionInput& in, const BlockPlace& place);
void gather_int8(Task* task, const AttentionInput& in, const BlockPlace& place,
                 const BlockPlace& next);
// The queries first .. last against the gathered block, each its visible positions.
void attend_float(Task* task, int64_t first, int64_t last, int64_t count);
void attend_int8(Task* task, int64_t first, int64_t last, int64_t count);

// visit(i, page, token, n): positions first + i .. + n lie in the page from its token on.
template <typename Visit>
PM_INLINE void for_page_runs(int64_t page_size, const BlockPlace& at, Visit visit) {
  int64_t page = at.first / page_size, token = at.first % page_size;
  for (int64_t i = 0; i < at.count; ++page, token = 0) {
    const int64_t n = std::min(at.count - i, page_size - token);
    visit(i, (int64_t)at.pages[page], token, n);
    i += n;
  }
}

}  // namespace pm
