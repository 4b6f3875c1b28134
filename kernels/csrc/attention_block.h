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

// The block of a PM_KV_INT8 pool. Words hold four bytes, of four neighbours in D or in positions.
struct IntBlock {
  int32_t* q;             // [nq, words]
  float* q_scale;         // [nq], with 1 / sqrt(D)
  int32_t* q_start;       // [nq]: where a dot product starts, see SIGNED_OFFSET
  const int32_t* k[BLOCK / RUN];  // of each run of positions: word j of position i at
  const int32_t* v[BLOCK / RUN];  // j * k_stride + i; positions 4 s .. 4 s + 3 at s * v_stride
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
// K and V of the positions first .. first + count of one kv head.
void gather_float(Task* task, const AttentionInput& in, const int32_t* pages, int64_t kv_head,
                  int64_t first, int64_t count);
void gather_int8(Task* task, const AttentionInput& in, const int32_t* pages, int64_t kv_head,
                 int64_t first, int64_t count);
// The queries first .. last against the gathered block, each its visible positions.
void attend_float(Task* task, int64_t first, int64_t last, int64_t count);
void attend_int8(Task* task, int64_t first, int64_t last, int64_t count);

// visit(i, page, token, n): positions first + i .. + n lie in the page from its token on.
template <typename Visit>
PM_INLINE void for_page_runs(int64_t page_size, const int32_t* pages, int64_t first, int64_t count,
                             Visit visit) {
  int64_t page = first / page_size, token = first % page_size;
  for (int64_t i = 0; i < count; ++page, token = 0) {
    const int64_t n = std::min(count - i, page_size - token);
    visit(i, (int64_t)pages[page], token, n);
    i += n;
  }
}

}  // namespace pm
