// What the operations offer to the model: plain functions over explicit ranges, no threads inside
// (linear_panels, rms_norm_row, ... compute one piece; model.cpp and api.cpp share pieces out).
#pragma once
#include <cstdint>

#include "palmette_cpu.h"
#include "vec.h"

namespace pm {

// ---- stored rows (encodings.cpp) ---------------------------------------------------------------

constexpr int64_t GROUP = 32;  // inputs that share a scale in the integer kinds

// One row as integers: w = scale * q + minimum per group.
struct IntegerRow {
  int8_t* q;        // [K]; 4 bits: 0 .. 15
  uint16_t* scale;  // [K / GROUP] half
  uint16_t* minimum;
};

int64_t encoded_row_bytes(int64_t encoding, int64_t k);  // 0: not known, or k does not fit
void decode_numbers(int64_t encoding, const unsigned char* data, int64_t k, float* out);
// q8_0, q4_0, q4_1, q4_k
void decode_integers(int64_t encoding, const unsigned char* data, int64_t k, IntegerRow row);
uint16_t float_to_half(float x);
uint16_t float_to_bf16(float x);

// ---- weights (matrix.cpp) ----------------------------------------------------------------------

constexpr int NV = PM_NV;      // vectors per panel
constexpr int PW = NV * W;    // outputs per panel
// Rows per tile of floats and of integers. Float accumulators of an integer tile may rest in memory
// during a group.
#if defined(PM_ISA_NEON)
constexpr int FLOAT_ROWS = 6;  // 6 x 4 accumulators + 4 weights + 1 of 32 registers
constexpr int INT_ROWS = 4;    // 4 x 4 integer accumulators
constexpr int FEW_INT_ROWS = INT_ROWS;
#elif PM_W == 16
constexpr int FLOAT_ROWS = 12;  // 12 x 2 + 2 + 1 of 32
constexpr int INT_ROWS = 6;     // 6 x 2 integer and 6 x 2 float accumulators
// Rows that are one tile all the same: weights that come from memory are then read while the whole
// step computes, which is worth the float accumulators that do not fit the registers.
constexpr int FEW_INT_ROWS = 8;
#else
constexpr int FLOAT_ROWS = 6;  // 6 x 2 + 2 + 1 of 16
constexpr int INT_ROWS = 4;    // 4 x 2 integer accumulators
constexpr int FEW_INT_ROWS = INT_ROWS;
#endif
constexpr int64_t TASK_PANELS = 4;  // panels that one task of a linear takes at most

inline bool is_integer(int64_t kind) { return kind >= PM_INT8; }
inline bool is_uint4(int64_t kind) { return kind == PM_UINT4 || kind == PM_UINT4_FAST; }
// The kinds whose activations have 15 bits, not 8.
constexpr bool has_fine_inputs(int64_t kind) { return kind == PM_INT8 || kind == PM_UINT4; }
// Bytes of a packed activation. AVX2 without VNNI multiplies signed bytes as 16-bit numbers
// (group_sums.h).
#if defined(PM_ISA_AVX2) && !defined(__AVXVNNI__)
constexpr bool HAS_WIDE_INPUTS = true;
#else
constexpr bool HAS_WIDE_INPUTS = false;
#endif
constexpr int64_t input_bytes(int64_t kind) {
  return has_fine_inputs(kind) || (HAS_WIDE_INPUTS && kind == PM_INT8_FAST) ? 2 : 1;
}

}  // namespace pm

// The rows of the matrix in panels of PW; rows past N are zero. One panel:
//   PM_F32, PM_BF16, PM_F16   [K][PW] numbers
//   PM_INT8*   per group of 32 inputs: [8][PW] x 4 bytes w + SIGNED_OFFSET, then PW half scales
//   PM_UINT4*  per group: [4][PW] x 4 bytes, low nibbles inputs 4j .. 4j + 3, high nibbles inputs
//              16 + 4j .. 16 + 4j + 3; then PW half scales, then PW half minima
struct PmMatrix {
  int64_t n, k, kind;
  int64_t num_panels, panel_bytes;
  unsigned char* data;
  void* mapping;  // what to free
  int64_t mapping_bytes;

  const unsigned char* panel(int64_t index) const { return data + index * panel_bytes; }
};

namespace pm {

constexpr int64_t INT8_GROUP_BYTES = GROUP * PW + 2 * PW;
constexpr int64_t UINT4_GROUP_BYTES = GROUP * PW / 2 + 4 * PW;

// `count` rows from `row` on, encoded.
struct EncodedRows {
  int64_t row, count, encoding;
  const unsigned char* data;
  int64_t row_bytes;
};

bool matrix_allocate(PmMatrix* matrix);  // sizes from n, k, kind; zeroed; false: no memory
void matrix_free(PmMatrix* matrix);
// The rows inside panels first .. last only. What rounding does is added to squares: the sum of
// the squared errors, and of the squares; neither where nothing is rounded.
void matrix_fill(PmMatrix* matrix, const EncodedRows& rows, int64_t first, int64_t last,
                 float* scratch, double* squares);
int64_t fill_scratch_floats(int64_t k);
bool can_fill(int64_t kind, int64_t encoding);
void matrix_row(const PmMatrix* matrix, int64_t row, float* out);  // out [K]

// ---- rows packed for a linear (pack.cpp) -------------------------------------------------------

// M rows cut into blocks, as even as possible. The cut changes which tile computes a row, never
// the row's bits. One block of R rows:
//   float kinds     [K][R] floats: a tile reads R neighbouring floats per k
//   integer kinds   per group: input_bytes * 32 bytes per row, then R float scales, then R sums of
//                   the group's integers (int8: int32; uint4: float, scaled). Inputs of one byte:
//                   [8][R] x 4; of two bytes: two such, high digits (base 128) first, or with
//                   HAS_WIDE_INPUTS [8][2][R] x 2 16-bit integers: 0 and 2, 1 and 3 of four
struct RowBlocks {
  int64_t m, num, base, extra;  // `extra` blocks of base + 1 rows, then blocks of base rows

  RowBlocks(int64_t rows, int64_t kind) : m(rows) {
    const int64_t few = is_integer(kind) ? FEW_INT_ROWS : FLOAT_ROWS;
    const int64_t most = rows <= few ? few : is_integer(kind) ? INT_ROWS : FLOAT_ROWS;
    num = (rows + most - 1) / most;
    base = num ? rows / num : 0;
    extra = num ? rows % num : 0;
  }
  int64_t start(int64_t block) const { return block * base + (block < extra ? block : extra); }
  int64_t rows(int64_t block) const { return base + (block < extra ? 1 : 0); }
};

// Bytes that M packed rows of K inputs need for this kind of matrix.
inline int64_t packed_bytes(int64_t kind, int64_t m, int64_t k) {
  if (!is_integer(kind)) return m * k * (int64_t)sizeof(float);
  return m * (k / GROUP) * (input_bytes(kind) * GROUP + 8);
}
// Columns k0 .. k1 of row `index` of a block of `rows` rows; x points at column k0. For integer
// kinds k0 and k1 are multiples of GROUP.
void pack_columns(int64_t kind, const float* x, int64_t k0, int64_t k1, int64_t index,
                  int64_t rows, unsigned char* block);
inline int64_t block_offset(int64_t kind, const RowBlocks& blocks, int64_t block, int64_t k) {
  return packed_bytes(kind, blocks.start(block), k);
}

// ---- linear (linear.cpp, linear_int.cpp) -------------------------------------------------------

// y[m][n] (+)= dot for all rows and the outputs of panels first .. last; y has `stride` floats
// per row.
void linear_panels(const PmMatrix* matrix, const unsigned char* packed, const RowBlocks& blocks,
                   int64_t first, int64_t last, bool add, float* y, int64_t stride);
void linear_panels_int(const PmMatrix* matrix, const unsigned char* packed,
                       const RowBlocks& blocks, int64_t first, int64_t last, bool add, float* y,
                       int64_t stride);

constexpr int PREFETCH_BYTES = 4096;  // ahead in each weight stream
PM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// The last outputs of a row; out of line, because it is in every tile and seldom used.
inline __attribute__((noinline)) void put_first(float* at, F value, int64_t outputs, bool add) {
  store_first(at, add ? load_first(at, outputs) + value : value, outputs);
}

// Stores or adds the vector of outputs n .. n + W of one row; `outputs` are left in the row.
PM_INLINE void put(float* row, int64_t n, int64_t outputs, F value, bool add) {
  float* at = row + n;
  if (n + W <= outputs)
    store(at, add ? load(at) + value : value);
  else if (n < outputs)
    put_first(at, value, outputs - n, add);
}

// How many panels one task takes, so that every member gets several tasks.
inline int64_t panels_per_task(int64_t num_panels, int num_threads) {
  const int64_t even = (num_panels + 4 * num_threads - 1) / (4 * num_threads);
  return even < 1 ? 1 : even > TASK_PANELS ? TASK_PANELS : even;
}

// ---- rows (rows.cpp) ---------------------------------------------------------------------------

void rms_norm_row(const float* x, const float* weight, int64_t k, float eps, float* y);
void silu_mul_row(const float* gate, const float* up, int64_t count, float* out);
void exp_row(const float* x, int64_t count, float* y);
void add_row(const float* x, int64_t count, float* y);  // y += x
// One head, rotate-half: x [D]; cos, sin [D / 2] of the position.
void rope_head(float* x, int64_t d, const float* cos_row, const float* sin_row);

// ---- choosing tokens (sample.cpp) --------------------------------------------------------------

constexpr int64_t MAXIMA_BLOCK = 64;  // values of a row whose maximum is kept
inline int64_t num_maxima(int64_t n) { return (n + MAXIMA_BLOCK - 1) / MAXIMA_BLOCK; }
// Of the first min(count, MAXIMA_BLOCK) values; NaN where any is NaN.
float block_maximum(const float* values, int64_t count);
int64_t sample_scratch_floats(int64_t vocab_size);
void sample_row(const PmSampling& sampling, int64_t index, float* scratch);

}  // namespace pm
