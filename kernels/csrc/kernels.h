// What the operations offer to the model: plain functions over explicit ranges, no threads inside
// (linear_panels, attention_task, ... compute one piece; model.cpp and api.cpp share pieces out).
#pragma once
#include <cstdint>
#include <vector>

#include "palmette_cpu.h"
#include "vec.h"

namespace pm {

// ---- weights and packed rows (linear.cpp) ------------------------------------------------------

constexpr int NV = 2;        // vectors per panel
constexpr int PW = NV * W;   // outputs per panel
#if PM_W == 16
constexpr int MAX_ROWS = 12;  // rows per tile: 12 x 2 accumulators + 2 weights + 1 of 32 registers
#else
constexpr int MAX_ROWS = 6;  // 6 x 2 + 2 + 1 of 16
#endif
constexpr int64_t GROUP_PANELS = 4;  // panels that one task of a linear takes at most

}  // namespace pm

// The rows of the matrix in panels of PW: data[panel][k][lane], rows past N are zero.
struct PmMatrix {
  int64_t n, k, kind;
  int64_t num_panels, panel_bytes;
  unsigned char* data;
  void* mapping;  // what to free
  int64_t mapping_bytes;

  const unsigned char* panel(int64_t index) const { return data + index * panel_bytes; }
};

namespace pm {

// M rows cut into blocks of at most MAX_ROWS, as even as possible. A block of R rows is packed
// [k][R], so a tile reads R neighbouring floats per k. The cut changes which tile computes a row,
// never the row's bits.
struct RowBlocks {
  int64_t m, num, base, extra;  // `extra` blocks of base + 1 rows, then blocks of base rows

  explicit RowBlocks(int64_t rows)
      : m(rows),
        num((rows + MAX_ROWS - 1) / MAX_ROWS),
        base(num ? rows / num : 0),
        extra(num ? rows % num : 0) {}
  int64_t start(int64_t block) const { return block * base + (block < extra ? block : extra); }
  int64_t rows(int64_t block) const { return base + (block < extra ? 1 : 0); }
};

bool matrix_allocate(PmMatrix* matrix);  // sizes from n, k, kind; zeroed; false: no memory
void matrix_free(PmMatrix* matrix);
// Rows row .. row + rows, those inside panels first .. last only, from data [rows, K].
void matrix_fill(PmMatrix* matrix, int64_t row, int64_t rows, const float* data, int64_t first,
                 int64_t last);
void matrix_row(const PmMatrix* matrix, int64_t row, float* out);  // out [K]

// Bytes that M packed rows of K inputs need for this kind of matrix.
int64_t packed_bytes(int64_t kind, int64_t m, int64_t k);
// Columns k0 .. k1 of row `index` of a block of `rows` rows; x points at column k0.
void pack_columns(int64_t kind, const float* x, int64_t k0, int64_t k1, int64_t k, int64_t index,
                  int64_t rows, unsigned char* block);
inline int64_t block_offset(int64_t kind, const RowBlocks& blocks, int64_t block, int64_t k) {
  return packed_bytes(kind, blocks.start(block), k);
}
// y[m][n] (+)= dot for all rows and the outputs of panels first .. last; y has `stride` floats
// per row.
void linear_panels(const PmMatrix* matrix, const unsigned char* packed, const RowBlocks& blocks,
                   int64_t first, int64_t last, bool add, float* y, int64_t stride);

// How many panels one task takes, so that every member gets several tasks.
int64_t panels_per_task(int64_t num_panels, int num_threads);

// ---- rows (rows.cpp) ---------------------------------------------------------------------------

void rms_norm_row(const float* x, const float* weight, int64_t k, float eps, float* y);
void silu_mul_row(const float* gate, const float* up, int64_t count, float* out);
void exp_row(const float* x, int64_t count, float* y);
void add_row(const float* x, int64_t count, float* y);  // y += x
// One head, rotate-half: x [D]; cos, sin [D / 2] of the position.
void rope_head(float* x, int64_t d, const float* cos_row, const float* sin_row);

// ---- attention (attention.cpp) -----------------------------------------------------------------

struct AttentionInput {
  const PmBatch* batch;
  const float* q;  // row t, head h at q + t * q_stride + h * D
  int64_t q_stride;
  const float* k_pages;  // [num_pages, page_size, G, D]
  const float* v_pages;
  int64_t page_size, num_heads, num_kv_heads, head_dim, window;
  float* out;  // [T, H, D]
};

// The pieces of one step's attention: (sequence, run of query rows, run of heads).
class AttentionPlan {
 public:
  AttentionPlan(const PmBatch* batch, int64_t num_heads, int64_t num_kv_heads, int num_threads);
  int64_t num_tasks() const { return (int64_t)runs_.size() * head_runs_; }
  int64_t scratch_floats(int64_t head_dim) const;  // per thread
  void run(const AttentionInput& input, int64_t task, float* scratch) const;

 private:
  struct Run {
    int64_t sequence, begin, end;  // rows begin .. end
  };
  const PmBatch* batch_;
  int64_t num_heads_, group_, rows_per_task_, heads_per_task_, head_runs_;
  std::vector<Run> runs_;
};

}  // namespace pm
