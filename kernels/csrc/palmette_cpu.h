// The C border of the CPU kernels: plain pointers in, int error codes out, sizes int64.
//
// Legend: M rows (tokens), N outputs, K inputs of a linear layer, T tokens of the step,
// B sequences, P pages over all sequences, S sampled rows, H query heads, G kv heads, D head dim,
// E hidden size, I intermediate size, V vocabulary. All arrays are C-contiguous; nothing is
// retained except what *_create returns and the matrices and vectors given to pm_model_set_*.
//
// Promise: the bits of a result row depend on that row's inputs only. Not on the other rows, their
// number, chunking, the page size, the page ids or the number of threads. Every output element has
// one fixed order of operations, the same in every code path of one build.
#pragma once
#include <cstdint>

#define PM_EXPORT extern "C" __attribute__((visibility("default")))

enum PmStatus : int {
  PM_OK = 0,
  PM_INVALID = 1,  // an argument is out of range
  PM_MEMORY = 2,   // out of memory
  PM_THREADS = 3,  // a thread could not be started
  PM_FORKED = 4,   // the pool was made by another process (fork): its threads are not here
};

// How a matrix keeps its weights. Integer kinds have one scale per 32 inputs, round activations per
// 32 inputs, and need K to be a multiple of 32. Activations have 15 bits (two digits to the base
// 128), which leaves next to no error, or 8 bits, which is faster with many rows.
enum PmKind : int64_t {
  PM_F32 = 0,
  PM_BF16 = 1,
  PM_F16 = 2,
  PM_INT8 = 3,        // w = scale * q; 15-bit activations
  PM_UINT4 = 4,       // w = scale * q + minimum; 15-bit activations
  PM_INT8_FAST = 5,   // the same with 8-bit activations
  PM_UINT4_FAST = 6,
};

// How rows are stored in a checkpoint; the block encodings are ggml's.
enum PmEncoding : int64_t {
  PM_ENCODING_F32 = 0,
  PM_ENCODING_F16 = 1,
  PM_ENCODING_BF16 = 2,
  PM_ENCODING_Q8_0 = 3,
  PM_ENCODING_Q4_0 = 4,
  PM_ENCODING_Q4_1 = 5,
  PM_ENCODING_Q4_K = 6,
  PM_ENCODING_Q5_K = 7,
  PM_ENCODING_Q6_K = 8,
};

// How the KV pool keeps K and V: numbers, or integers with one float scale for each token and kv
// head. attention.h says how pages lie.
enum PmKvKind : int64_t {
  PM_KV_F32 = 0,
  PM_KV_BF16 = 1,
  PM_KV_F16 = 2,
  PM_KV_INT8 = 3,
};

// A KV pool: for each layer num_pages pages of K, then num_pages pages of V.
struct PmKv {
  unsigned char* data;
  int64_t kind, num_pages, page_size;
};

struct PmModelShape {
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_layers;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t max_positions;   // rows of the rope tables
  int64_t sliding_window;  // 0: none
  float rms_eps;
};

// The vectors of a model; layer is ignored for PM_FINAL_NORM and the rope tables.
enum PmVector : int64_t {
  PM_INPUT_NORM = 0,      // [E]
  PM_POST_NORM = 1,       // [E]
  PM_QKV_BIAS = 2,        // [(H + 2G) * D], optional
  PM_Q_NORM = 3,          // [D], optional
  PM_K_NORM = 4,          // [D], optional
  PM_FINAL_NORM = 5,      // [E]
  PM_ROPE_COS = 6,        // [max_positions, D / 2]
  PM_ROPE_SIN = 7,        // [max_positions, D / 2]
};

// The matrices of a model; layer is ignored for the last two.
enum PmMatrixRole : int64_t {
  PM_QKV = 0,        // [(H + 2G) * D, E]: the rows of q, then k, then v
  PM_O = 1,          // [E, H * D]
  PM_GATE_UP = 2,    // the rows of gate [I, E]; from the next multiple of 32 rows on, those of up
  PM_DOWN = 3,       // [E, I]
  PM_EMBEDDING = 4,  // [V, E]
  PM_LM_HEAD = 5,    // [V, E]; may be the same matrix as the embedding
};

// kernels/batch.py's ForwardBatch. Checked by the caller.
struct PmBatch {
  int64_t num_tokens;
  int64_t num_sequences;
  int64_t num_sampled;
  const int32_t* token_ids;         // [T]
  const int32_t* positions;         // [T]
  const int32_t* kv_slots;          // [T]
  const int32_t* qo_indptr;         // [B + 1]
  const int32_t* kv_indptr;         // [B + 1]
  const int32_t* kv_page_ids;       // [P]
  const int32_t* kv_last_page_len;  // [B]
  const int32_t* sample_rows;       // [S]
};

// One step's choices, by the rule of kernels/sampling.py. Checked by the caller.
struct PmSampling {
  int64_t num_rows;  // S
  int64_t vocab_size;
  int64_t most_top;             // width of top_ids and top_logprobs
  const float* logits;          // [S, V]
  const float* maxima;          // of the logits, as pm_model_forward leaves them; null: not known
  const float* const* edited;   // [S] the row to choose from, [V]; null: that of the logits
  const int32_t* const* masks;  // [S] bits of the allowed ids, [ceil(V / 32)]; null: all
  const int32_t* targets;       // [S] -1: choose
  const float* temperature;     // [S]
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* random;    // [S] in [0, 1)
  const int32_t* num_top;  // [S]
  int32_t* token_ids;      // [S] results
  float* logprobs;
  int32_t* top_ids;  // [S, most_top]
  float* top_logprobs;
};

struct PmPool;
struct PmMatrix;
struct PmModel;

// Threads. num_threads counts the caller; workers sleep between calls.
PM_EXPORT int pm_pool_create(int64_t num_threads, PmPool** pool);
PM_EXPORT void pm_pool_destroy(PmPool* pool);

// A weight matrix [N, K], repacked into panels for the kernels of this build.
PM_EXPORT int pm_matrix_create(int64_t n, int64_t k, int64_t kind, PmMatrix** matrix);
PM_EXPORT void pm_matrix_destroy(PmMatrix* matrix);
PM_EXPORT int64_t pm_matrix_bytes(const PmMatrix* matrix);
// Rows row .. row + rows from encoded data. PM_UINT4* take q4_0, q4_1 and q4_k and keep their
// integers, as PM_INT8* do those of q8_0; otherwise every encoding is widened to float32 and rounded
// to the kind. Adds to squares [2] the sum of the squared rounding errors and that of the squares
// of the numbers, where anything is rounded.
PM_EXPORT int pm_matrix_fill(PmPool* pool, PmMatrix* matrix, int64_t row, int64_t rows,
                             int64_t encoding, const void* data, double* squares);

// Single operations, for tests and for measuring; the model uses the same code.
// y [M, N] = x [M, K] * matrix^T
PM_EXPORT int pm_linear(PmPool* pool, const PmMatrix* matrix, const float* x, int64_t m, float* y);
// out [M, K] float32: rows of the matrix
PM_EXPORT int pm_embed(PmPool* pool, const PmMatrix* matrix, const int32_t* ids, int64_t m,
                       float* out);
PM_EXPORT int pm_rms_norm(PmPool* pool, const float* x, const float* weight, int64_t m, int64_t k,
                          float eps, float* y);
// gate_up [M, 2I] -> out [M, I] = silu(gate) * up
PM_EXPORT int pm_silu_mul(PmPool* pool, const float* gate_up, int64_t m, int64_t i, float* out);
// x [T, heads, D] in place: rotate-half with rows of cos, sin [max_positions, D / 2]
PM_EXPORT int pm_rope(PmPool* pool, float* x, const int32_t* positions, int64_t t, int64_t heads,
                      int64_t d, const float* cos_table, const float* sin_table);
// k and v [T, G, D] into the batch's slots of the first layer of the pool
// Whether every index of the batch lies inside its array, num_page_ids being the length of
// kv_page_ids: PM_OK or PM_INVALID.
PM_EXPORT int pm_check_batch(const PmBatch* batch, int64_t num_page_ids, const PmKv* kv,
                             int64_t vocab_size, int64_t max_positions);
PM_EXPORT int pm_kv_write(PmPool* pool, const PmBatch* batch, const float* k, const float* v,
                          const PmKv* kv, int64_t g, int64_t d);
// q [T, H, D], out [T, H, D]; the first layer of the pool; window 0: none
PM_EXPORT int pm_attention(PmPool* pool, const PmBatch* batch, const float* q, const PmKv* kv,
                           int64_t h, int64_t g, int64_t d, int64_t window, float* out);
// scratch [threads, pm_sample_scratch(V)] floats, 64-byte aligned
PM_EXPORT int64_t pm_sample_scratch(int64_t vocab_size);
PM_EXPORT int pm_sample(PmPool* pool, const PmSampling* sampling, float* scratch);
PM_EXPORT int pm_exp(PmPool* pool, const float* x, int64_t n, float* y);

// The whole model. It borrows the pool, the matrices and the vectors: keep them alive.
PM_EXPORT int pm_model_create(PmPool* pool, const PmModelShape* shape, PmModel** model);
PM_EXPORT void pm_model_destroy(PmModel* model);
PM_EXPORT int pm_model_set_matrix(PmModel* model, int64_t role, int64_t layer,
                                  const PmMatrix* matrix);
PM_EXPORT int pm_model_set_vector(PmModel* model, int64_t vector, int64_t layer,
                                  const float* data);
// One step: writes K and V, reads them, and gives logits [S, V] with the maxima of each 64 of a row
// [S, ceil(V / 64)], NaN where one of them is NaN.
PM_EXPORT int pm_model_forward(PmModel* model, const PmBatch* batch, const PmKv* kv, float* logits,
                               float* maxima);

// What the machine can do: runs `count` rounds on num_threads threads, or reads `count` bytes of
// data shared out over them; work: the multiply-adds or bytes that this was.
enum PmLimit : int64_t {
  PM_LIMIT_READ = 0,
  PM_LIMIT_FLOAT = 1,
  PM_LIMIT_INT8 = 2,
  PM_LIMIT_GROUPS = 3,  // int8, with a scale per group of 32
};
PM_EXPORT int pm_limit(PmPool* pool, int64_t what, int64_t num_threads, int64_t count,
                       const void* data, int64_t* work);

PM_EXPORT const char* pm_describe();  // instruction set of this build
