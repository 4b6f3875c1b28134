// Whether every index of a batch lies inside its array: the kernels trust them afterwards.
#include "palmette_cpu.h"

namespace pm {
namespace {

bool is_within(const int32_t* values, int64_t count, int64_t low, int64_t end) {
  bool is_in = true;
  for (int64_t i = 0; i < count; ++i) is_in &= values[i] >= low && values[i] < end;
  return is_in;
}

bool rises(const int32_t* indptr, int64_t count, int64_t step, int64_t total) {
  bool is_rising = indptr[0] == 0 && indptr[count] == total;
  for (int64_t i = 0; i < count; ++i)
    is_rising &= (int64_t)indptr[i + 1] - indptr[i] >= step;
  return is_rising;
}

}  // namespace
}  // namespace pm

int pm_check_batch(const PmBatch* batch, int64_t num_page_ids, const PmKv* kv, int64_t vocab_size,
                   int64_t max_positions) {
  const PmBatch& b = *batch;
  const int64_t slots = kv->num_pages * kv->page_size;
  if (!pm::is_within(b.token_ids, b.num_tokens, 0, vocab_size) ||
      !pm::is_within(b.positions, b.num_tokens, 0, max_positions) ||
      !pm::is_within(b.kv_slots, b.num_tokens, 0, slots) ||
      !pm::rises(b.qo_indptr, b.num_sequences, 0, b.num_tokens) ||
      !pm::rises(b.kv_indptr, b.num_sequences, 1, num_page_ids) ||
      !pm::is_within(b.kv_page_ids, num_page_ids, 0, kv->num_pages) ||
      !pm::is_within(b.kv_last_page_len, b.num_sequences, 1, kv->page_size + 1) ||
      !pm::is_within(b.sample_rows, b.num_sampled, 0, b.num_tokens))
    return PM_INVALID;
  for (int64_t i = 0; i < b.num_sequences; ++i) {
    const int64_t pages = b.kv_indptr[i + 1] - b.kv_indptr[i];
    const int64_t length = (pages - 1) * kv->page_size + b.kv_last_page_len[i];
    if (!pm::is_within(b.positions + b.qo_indptr[i], b.qo_indptr[i + 1] - b.qo_indptr[i], 0, length))
      return PM_INVALID;
  }
  return PM_OK;
}
