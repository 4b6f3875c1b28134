// The single operations behind the C border: checks, threads, error codes.
#include <new>
#include <system_error>
#include <vector>

#include "attention.h"
#include "team.h"

namespace pm {
namespace {

// Runs piece(first, last) over `count` pieces on the pool; `run` pieces at a time.
template <typename Piece>
int share(PmPool* pool, int64_t count, int64_t run, Piece piece) {
  if (pool->team.is_forked()) return PM_FORKED;
  struct Job {
    Team* team;
    Phase phase;
    int64_t count, run;
    Piece* piece;
  } job{&pool->team, {}, count, run, &piece};
  pool->team.run(
      [](void* context, int member) {
        const FloatMode mode;
        Job& j = *(Job*)context;
        j.team->share(j.phase, member, j.count, j.run,
                      [&](int64_t first, int64_t last) { (*j.piece)(first, last, member); });
      },
      &job);
  return PM_OK;
}

}  // namespace
}  // namespace pm

const char* pm_describe() { return PM_ISA_NAME; }

int pm_pool_create(int64_t num_threads, PmPool** pool) {
  *pool = nullptr;
  if (num_threads < 1 || num_threads > 1024) return PM_INVALID;
  try {
    *pool = new PmPool((int)num_threads);
  } catch (const std::bad_alloc&) {
    return PM_MEMORY;
  } catch (const std::system_error&) {
    return PM_THREADS;
  }
  return PM_OK;
}

void pm_pool_destroy(PmPool* pool) {
  // After a fork the workers exist in the other process only; joining would wait for ever.
  if (pool && !pool->team.is_forked()) delete pool;
}

int pm_matrix_create(int64_t n, int64_t k, int64_t kind, PmMatrix** matrix) {
  *matrix = nullptr;
  if (n < 1 || k < 1 || kind < PM_F32 || kind > PM_UINT4_FAST) return PM_INVALID;
  if (pm::is_integer(kind) && k % pm::GROUP) return PM_INVALID;
  PmMatrix* made = new (std::nothrow) PmMatrix{};
  if (!made) return PM_MEMORY;
  made->n = n;
  made->k = k;
  made->kind = kind;
  if (!pm::matrix_allocate(made)) {
    delete made;
    return PM_MEMORY;
  }
  *matrix = made;
  return PM_OK;
}

void pm_matrix_destroy(PmMatrix* matrix) {
  if (!matrix) return;
  pm::matrix_free(matrix);
  delete matrix;
}

int64_t pm_matrix_bytes(const PmMatrix* matrix) {
  return matrix->num_panels * matrix->panel_bytes;
}

int pm_matrix_fill(PmPool* pool, PmMatrix* matrix, int64_t row, int64_t rows, int64_t encoding,
                   const void* data, double* squares) {
  const int64_t row_bytes = pm::encoded_row_bytes(encoding, matrix->k);
  if (row < 0 || rows < 0 || row + rows > matrix->n || row_bytes == 0) return PM_INVALID;
  if (!pm::can_fill(matrix->kind, encoding)) return PM_INVALID;
  const int64_t floats = pm::fill_scratch_floats(matrix->k);
  const size_t team = (size_t)pool->team.size();
  std::vector<float> scratch;
  std::vector<double> parts;
  try {
    scratch.resize((size_t)floats * team);
    parts.resize(2 * team);
  } catch (const std::bad_alloc&) {
    return PM_MEMORY;
  }
  const pm::EncodedRows encoded{row, rows, encoding, (const unsigned char*)data, row_bytes};
  const int64_t first = row / pm::PW, last = (row + rows + pm::PW - 1) / pm::PW;
  const int status = pm::share(pool, last - first, 8, [&](int64_t a, int64_t b, int member) {
    pm::matrix_fill(matrix, encoded, first + a, first + b, scratch.data() + member * floats,
                    parts.data() + 2 * member);
  });
  for (size_t i = 0; i < 2 * team; ++i) squares[i % 2] += parts[i];
  return status;
}

int pm_linear(PmPool* pool, const PmMatrix* matrix, const float* x, int64_t m, float* y) {
  if (m < 0) return PM_INVALID;
  if (m == 0) return PM_OK;
  const int64_t k = matrix->k;
  const pm::RowBlocks blocks(m, matrix->kind);
  std::vector<unsigned char> packed;
  try {
    packed.resize((size_t)pm::packed_bytes(matrix->kind, m, k) + 64);
  } catch (const std::bad_alloc&) {
    return PM_MEMORY;
  }
  unsigned char* at = (unsigned char*)(((uintptr_t)packed.data() + 63) / 64 * 64);
  const int status = pm::share(pool, blocks.num, 1, [&](int64_t b, int64_t, int) {
    for (int64_t r = 0; r < blocks.rows(b); ++r)
      pm::pack_columns(matrix->kind, x + (blocks.start(b) + r) * k, 0, k, r, blocks.rows(b),
                       at + pm::block_offset(matrix->kind, blocks, b, k));
  });
  if (status != PM_OK) return status;
  return pm::share(pool, matrix->num_panels,
                   pm::panels_per_task(matrix->num_panels, pool->team.size()),
                   [&](int64_t first, int64_t last, int) {
                     pm::linear_panels(matrix, at, blocks, first, last, false, y, matrix->n);
                   });
}

int pm_embed(PmPool* pool, const PmMatrix* matrix, const int32_t* ids, int64_t m, float* out) {
  for (int64_t i = 0; i < m; ++i)
    if (ids[i] < 0 || ids[i] >= matrix->n) return PM_INVALID;
  return pm::share(pool, m, 1, [&](int64_t i, int64_t, int) {
    pm::matrix_row(matrix, ids[i], out + i * matrix->k);
  });
}

int pm_rms_norm(PmPool* pool, const float* x, const float* weight, int64_t m, int64_t k, float eps,
                float* y) {
  if (m < 0 || k < 1) return PM_INVALID;
  return pm::share(pool, m, 1, [&](int64_t i, int64_t, int) {
    pm::rms_norm_row(x + i * k, weight, k, eps, y + i * k);
  });
}

int pm_silu_mul(PmPool* pool, const float* gate_up, int64_t m, int64_t i, float* out) {
  if (m < 0 || i < 1) return PM_INVALID;
  return pm::share(pool, m, 1, [&](int64_t row, int64_t, int) {
    pm::silu_mul_row(gate_up + row * 2 * i, gate_up + row * 2 * i + i, i, out + row * i);
  });
}

int pm_exp(PmPool* pool, const float* x, int64_t n, float* y) {
  if (n < 0) return PM_INVALID;
  return pm::share(pool, 1, 1, [&](int64_t, int64_t, int) { pm::exp_row(x, n, y); });
}

int64_t pm_sample_scratch(int64_t vocab_size) {
  return (pm::sample_scratch_floats(vocab_size) + 15) / 16 * 16;
}

int pm_sample(PmPool* pool, const PmSampling* sampling, float* scratch) {
  const int64_t floats = pm_sample_scratch(sampling->vocab_size);
  if (sampling->num_rows == 1) {  // waking the others would cost more than the row
    const pm::FloatMode mode;
    pm::sample_row(*sampling, 0, scratch);
    return PM_OK;
  }
  return pm::share(pool, sampling->num_rows, 1, [&](int64_t row, int64_t, int member) {
    pm::sample_row(*sampling, row, scratch + member * floats);
  });
}

int pm_rope(PmPool* pool, float* x, const int32_t* positions, int64_t t, int64_t heads, int64_t d,
            const float* cos_table, const float* sin_table) {
  if (t < 0 || heads < 1 || d < 2 || d % 2) return PM_INVALID;
  return pm::share(pool, t, 1, [&](int64_t row, int64_t, int) {
    const int64_t at = positions[row] * (d / 2);
    for (int64_t h = 0; h < heads; ++h)
      pm::rope_head(x + (row * heads + h) * d, d, cos_table + at, sin_table + at);
  });
}

namespace {

bool is_valid(const PmKv* kv, int64_t g, int64_t d) {
  return g > 0 && d > 0 && kv->page_size > 0 && kv->num_pages > 0 && kv->kind >= PM_KV_F32 &&
         kv->kind <= PM_KV_INT8;
}

}  // namespace

int pm_kv_write(PmPool* pool, const PmBatch* batch, const float* k, const float* v, const PmKv* kv,
                int64_t g, int64_t d) {
  if (!is_valid(kv, g, d)) return PM_INVALID;
  const pm::KvLayout layout{kv->kind, kv->page_size, g, d};
  unsigned char* v_side = kv->data + kv->num_pages * layout.page_bytes();
  return pm::share(pool, batch->num_tokens, 8, [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      pm::kv_write(layout, kv->data, v_side, batch->kv_slots[t], k + t * g * d, v + t * g * d);
    }
  });
}

int pm_attention(PmPool* pool, const PmBatch* batch, const float* q, const PmKv* kv, int64_t h,
                 int64_t g, int64_t d, int64_t window, float* out) {
  if (!is_valid(kv, g, d) || h < 1 || h % g) return PM_INVALID;
  try {
    const pm::KvLayout layout{kv->kind, kv->page_size, g, d};
    pm::AttentionPlan plan(batch, h, layout, window, pool->team.size());
    const unsigned char* v_side = kv->data + kv->num_pages * layout.page_bytes();
    const pm::AttentionInput input{batch, q, h * d, layout, kv->data, v_side, h, window, out};
    const int64_t floats = plan.scratch_floats();
    std::vector<float> scratch((size_t)(floats * pool->team.size()));
    return pm::share(pool, plan.num_pieces(), 1, [&](int64_t task, int64_t, int member) {
      plan.run(input, task, scratch.data() + member * floats);
    });
  } catch (const std::bad_alloc&) {
    return PM_MEMORY;
  }
}
