// The whole model in one call: every member of the team walks through the phases of forward(),
// whose pieces they share. Which member computes which piece does not matter to any bit.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "attention.h"
#include "team.h"

struct PmModel {
  PmPool* pool;
  PmModelShape shape;
  struct Layer {
    const PmMatrix *qkv = nullptr, *o = nullptr, *gate_up = nullptr, *down = nullptr;
    const float *input_norm = nullptr, *post_norm = nullptr;
    const float *qkv_bias = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  };
  std::vector<Layer> layers;
  const PmMatrix *embedding = nullptr, *lm_head = nullptr;
  const float *final_norm = nullptr, *cos_table = nullptr, *sin_table = nullptr;
  std::vector<float> scratch;  // grows to the largest step seen
};

namespace pm {
namespace {

constexpr int64_t PHASES_PER_LAYER = 10;
constexpr int64_t BLOCK_ROWS = FLOAT_ROWS > FEW_INT_ROWS ? FLOAT_ROWS : FEW_INT_ROWS;  // at most
// Columns of gate and of up that are computed, multiplied and packed before the next ones: fewer
// where many rows make them large.
constexpr int64_t FEW_COLUMNS = 2 * GROUP, MOST_COLUMNS = 4 * GROUP, MANY_ROWS = 64;
static_assert(GROUP % PW == 0, "columns are whole panels");

int64_t columns_at_once(int64_t num_rows) {
  return num_rows > MANY_ROWS ? FEW_COLUMNS : MOST_COLUMNS;
}

// Where the rows of up begin in the matrix that has gate above them.
int64_t up_row(int64_t intermediate_size) {
  return (intermediate_size + GROUP - 1) / GROUP * GROUP;
}

// The rows that the last layer computes to its end: those that are sampled. Of the others it needs
// K and V only.
struct LastRows {
  bool is_fewer = false;  // than the step's rows
  std::vector<int32_t> positions, qo_indptr;
  PmBatch batch;                      // the step's, with these rows only
  std::optional<AttentionPlan> plan;  // of this batch

  void choose(const PmBatch& step) {
    for (int64_t i = 1; i < step.num_sampled; ++i)  // so that rows can move to the front in place
      if (step.sample_rows[i] <= step.sample_rows[i - 1]) return;
    is_fewer = step.num_sampled < step.num_tokens;
    if (!is_fewer) return;
    qo_indptr.push_back(0);
    for (int64_t b = 0, i = 0; b < step.num_sequences; ++b) {
      for (; i < step.num_sampled && step.sample_rows[i] < step.qo_indptr[b + 1]; ++i)
        positions.push_back(step.positions[step.sample_rows[i]]);
      qo_indptr.push_back((int32_t)i);
    }
    batch = step;
    batch.num_tokens = step.num_sampled;
    batch.positions = positions.data();
    batch.qo_indptr = qo_indptr.data();
  }
};

// One step; shared by all members.
struct Step {
  PmModel* model;
  const PmBatch* batch;
  const PmKv* kv;
  KvLayout layout;  // of the pool
  float* logits;  // [S, V]
  float* maxima;  // [S, num_maxima(V)]
  AttentionPlan plan;
  std::vector<Phase> phases;
  int num_threads;

  float* hidden;    // [T, E]
  float* qkv;       // [T, (H + 2G) * D]
  float* attended;  // [T, H * D]
  unsigned char* packed;       // rows of the other linears
  unsigned char* packed_down;  // of down
  float* private_scratch;  // per member
  int64_t private_floats;
  unsigned char* private_packed;  // per member, one block of rows
  int64_t private_packed_bytes;
  LastRows last;
};

// One member's walk through the phases.
class Member {
 public:
  Member(Step* step, int index)
      : s_(*step),
        m_(*step->model),
        shape_(step->model->shape),
        index_(index),
        num_rows_(step->batch->num_tokens) {
    private_ = s_.private_scratch + index * s_.private_floats;
    private_packed_ = s_.private_packed + index * s_.private_packed_bytes;
  }

  void forward() {
    embed();
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      const PmModel::Layer& l = m_.layers[layer];
      normalise(l.input_norm, l.qkv->kind);
      linear(l.qkv, false, s_.qkv, qkv_width());
      place_qkv(l, layer);
      if (s_.last.is_fewer && layer == shape_.num_layers - 1) {
        if (s_.batch->num_sampled == 0) return;
        keep_sampled_rows();
      }
      attend(layer);
      pack_attended(l.o->kind);
      linear(l.o, true, s_.hidden, shape_.hidden_size);
      normalise(l.post_norm, l.gate_up->kind);
      gate_up(l);
      linear(l.down, true, s_.hidden, shape_.hidden_size);
    }
    sample_rows();
  }

 private:
  int64_t qkv_width() const {
    return (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim;
  }

  // piece(first, last) for runs of at most `run` of `count` pieces; returns when all are done.
  template <typename Piece>
  void share(int64_t count, int64_t run, Piece piece) {
    m_.pool->team.share(s_.phases[phase_++], index_, count, run, piece);
  }

  // Calls piece(block) for the blocks of rows that the next linear reads. A single block is packed
  // by every member for itself: nobody would have done anything else meanwhile. A member that is
  // late packs rows that others are changing already; it then finds no piece left to use them for.
  template <typename Piece>
  void prepare(const RowBlocks& blocks, Piece piece) {
    packed_ = blocks.num > 1 ? s_.packed : private_packed_;
    if (blocks.num > 1)
      share(blocks.num, 1, [&](int64_t b, int64_t) { piece(b); });
    else if (blocks.num == 1)
      piece(0);
  }

  void embed() {
    share(s_.batch->num_tokens, 8, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        matrix_row(m_.embedding, s_.batch->token_ids[t], s_.hidden + t * shape_.hidden_size);
    });
  }

  void normalise(const float* weight, int64_t kind) {
    const int64_t e = shape_.hidden_size;
    const RowBlocks blocks(num_rows_, kind);
    prepare(blocks, [&](int64_t b) {
      unsigned char* block = packed_ + block_offset(kind, blocks, b, e);
      for (int64_t r = 0; r < blocks.rows(b); ++r) {
        rms_norm_row(s_.hidden + (blocks.start(b) + r) * e, weight, e, shape_.rms_eps, private_);
        pack_columns(kind, private_, 0, e, r, blocks.rows(b), block);
      }
    });
  }

  void linear(const PmMatrix* matrix, bool add, float* y, int64_t stride) {
    const RowBlocks blocks(num_rows_, matrix->kind);
    share(matrix->num_panels, panels_per_task(matrix->num_panels, s_.num_threads),
          [&](int64_t first, int64_t last) {
            linear_panels(matrix, packed_, blocks, first, last, add, y, stride);
          });
  }

  // Bias, q/k norm and rope in place; K and V into their slots.
  void place_qkv(const PmModel::Layer& l, int64_t layer) {
    const int64_t h = shape_.num_heads, g = shape_.num_kv_heads, d = shape_.head_dim;
    unsigned char* k_pages = pages(layer, 0);
    unsigned char* v_pages = pages(layer, 1);
    // Neighbouring tokens write to the same cache lines of a page.
    const int64_t run = std::clamp<int64_t>(s_.batch->num_tokens / (4 * s_.num_threads), 4, 64);
    share(s_.batch->num_tokens, run, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        float* row = s_.qkv + t * qkv_width();
        if (l.qkv_bias) add_row(l.qkv_bias, qkv_width(), row);
        const int64_t rope = s_.batch->positions[t] * (d / 2);
        for (int64_t head = 0; head < h + g; ++head) {
          const float* norm = head < h ? l.q_norm : l.k_norm;
          if (norm) rms_norm_row(row + head * d, norm, d, shape_.rms_eps, row + head * d);
          rope_head(row + head * d, d, m_.cos_table + rope, m_.sin_table + rope);
        }
        kv_write(s_.layout, k_pages, v_pages, s_.batch->kv_slots[t], row + h * d,
                 row + (h + g) * d);
      }
    });
  }

  // Moves the rows of hidden and qkv to the front; from here on there are no others.
  void keep_sampled_rows() {
    share(1, 1, [&](int64_t, int64_t) {
      const int64_t e = shape_.hidden_size, width = qkv_width();
      for (int64_t i = 0; i < s_.batch->num_sampled; ++i) {
        const int64_t row = s_.batch->sample_rows[i];
        if (row == i) continue;
        std::memcpy(s_.hidden + i * e, s_.hidden + row * e, (size_t)e * sizeof(float));
        std::memcpy(s_.qkv + i * width, s_.qkv + row * width, (size_t)width * sizeof(float));
      }
    });
    num_rows_ = s_.batch->num_sampled;
    plan_ = &*s_.last.plan;
    batch_ = &s_.last.batch;
  }

  void attend(int64_t layer) {
    AttentionInput input;
    input.batch = batch_;
    input.q = s_.qkv;
    input.q_stride = qkv_width();
    input.k_pages = pages(layer, 0);
    input.v_pages = pages(layer, 1);
    input.kv = s_.layout;
    input.num_heads = shape_.num_heads;
    input.window = shape_.sliding_window;
    input.out = s_.attended;
    share(plan_->num_pieces(), 1,
          [&](int64_t task, int64_t) { plan_->run(input, task, private_); });
  }

  void pack_attended(int64_t kind) {
    const int64_t k = shape_.num_heads * shape_.head_dim;
    const RowBlocks blocks(num_rows_, kind);
    prepare(blocks, [&](int64_t b) {
      for (int64_t r = 0; r < blocks.rows(b); ++r)
        pack_columns(kind, s_.attended + (blocks.start(b) + r) * k, 0, k, r, blocks.rows(b),
                     packed_ + block_offset(kind, blocks, b, k));
    });
  }

  // silu(gate) * up, packed for down. What gate and up give for some columns stays in the nearer
  // caches until it is packed.
  void gate_up(const PmModel::Layer& l) {
    const PmMatrix& matrix = *l.gate_up;
    const RowBlocks blocks(num_rows_, matrix.kind);
    const int64_t size = shape_.intermediate_size;
    const int64_t columns = columns_at_once(num_rows_);
    const int64_t panels = panels_per_task(matrix.num_panels, s_.num_threads);
    share((size + columns - 1) / columns, std::max<int64_t>(1, panels * PW / (2 * columns)),
          [&](int64_t first, int64_t last) {
            for (int64_t k = first * columns; k < std::min(last * columns, size); k += columns)
              gate_up_columns(matrix, blocks, k, std::min(k + columns, size), columns,
                              l.down->kind);
          });
    packed_ = s_.packed_down;
  }

  void gate_up_columns(const PmMatrix& matrix, const RowBlocks& blocks, int64_t k0, int64_t k1,
                       int64_t stride, int64_t kind) {
    const RowBlocks packed(num_rows_, kind);
    const int64_t size = shape_.intermediate_size;
    float* gate = private_;  // [rows, stride]
    float* up = gate + num_rows_ * stride;
    compute_columns(matrix, blocks, k0, k1, gate, stride);
    compute_columns(matrix, blocks, up_row(size) + k0, up_row(size) + k1, up, stride);
    for (int64_t b = 0; b < packed.num; ++b) {
      unsigned char* block = s_.packed_down + block_offset(kind, packed, b, size);
      for (int64_t r = 0; r < packed.rows(b); ++r, gate += stride, up += stride) {
        silu_mul_row(gate, up, k1 - k0, gate);
        pack_columns(kind, gate, k0, k1, r, packed.rows(b), block);
      }
    }
  }

  // Outputs n0 .. n1 of the packed rows, n0 a multiple of PW.
  void compute_columns(const PmMatrix& matrix, const RowBlocks& blocks, int64_t n0, int64_t n1,
                       float* y, int64_t stride) const {
    linear_panels(&matrix, packed_, blocks, n0 / PW, (n1 + PW - 1) / PW, false, y - n0, stride);
  }

  void sample_rows() {
    const int64_t e = shape_.hidden_size, kind = m_.lm_head->kind;
    const RowBlocks blocks(s_.batch->num_sampled, kind);
    prepare(blocks, [&](int64_t b) {
      for (int64_t r = 0; r < blocks.rows(b); ++r) {
        const int64_t i = blocks.start(b) + r;
        const int64_t row = s_.last.is_fewer ? i : s_.batch->sample_rows[i];
        rms_norm_row(s_.hidden + row * e, m_.final_norm, e, shape_.rms_eps, private_);
        pack_columns(kind, private_, 0, e, r, blocks.rows(b),
                     packed_ + block_offset(kind, blocks, b, e));
      }
    });
    constexpr int64_t run = std::max(TASK_PANELS, MAXIMA_BLOCK / PW);
    static_assert(run * PW % MAXIMA_BLOCK == 0, "a run has whole blocks of maxima");
    share(blocks.num ? m_.lm_head->num_panels : 0, run, [&](int64_t first, int64_t last) {
      linear_panels(m_.lm_head, packed_, blocks, first, last, false, s_.logits,
                    shape_.vocab_size);
      keep_maxima(first * PW, std::min(last * PW, shape_.vocab_size));
    });
  }

  // Of the logits n0 .. n1, while they are near.
  void keep_maxima(int64_t n0, int64_t n1) {
    for (int64_t i = 0; i < s_.batch->num_sampled; ++i) {
      const float* logits = s_.logits + i * shape_.vocab_size;
      float* maxima = s_.maxima + i * num_maxima(shape_.vocab_size);
      for (int64_t n = n0; n < n1; n += MAXIMA_BLOCK)
        maxima[n / MAXIMA_BLOCK] = block_maximum(logits + n, n1 - n);
    }
  }

  unsigned char* pages(int64_t layer, int64_t which) const {
    return s_.kv->data + (layer * 2 + which) * s_.kv->num_pages * s_.layout.page_bytes();
  }

  Step& s_;
  PmModel& m_;
  const PmModelShape& shape_;
  const int index_;
  int64_t phase_ = 0;
  int64_t num_rows_;  // the step's, or those the last layer keeps
  AttentionPlan* plan_ = &s_.plan;
  const PmBatch* batch_ = s_.batch;
  float* private_;
  unsigned char* private_packed_;
  unsigned char* packed_ = nullptr;  // the rows that the next linear reads
};

void run_member(void* context, int index) {
  const FloatMode mode;
  Member((Step*)context, index).forward();
}

int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16; }

// Lays the buffers of the step out in the model's scratch. Throws std::bad_alloc.
void lay_out(Step* s) {
  const PmModelShape& shape = s->model->shape;
  const int64_t t = s->batch->num_tokens, d = shape.head_dim;
  const int64_t attended = shape.num_heads * d;
  const int64_t qkv = attended + 2 * shape.num_kv_heads * d;
  const int64_t widest = std::max(shape.hidden_size, attended);
  const int64_t packed = (packed_bytes(PM_F32, t, widest) + 3) / 4;
  const int64_t packed_down = (packed_bytes(PM_F32, t, shape.intermediate_size) + 3) / 4;
  const int64_t block = aligned((packed_bytes(PM_F32, BLOCK_ROWS, widest) + 3) / 4) + 64;
  int64_t attention = s->plan.scratch_floats();
  if (s->last.plan) attention = std::max(attention, s->last.plan->scratch_floats());
  const int64_t columns = std::max(t * FEW_COLUMNS, std::min(t, MANY_ROWS) * MOST_COLUMNS);
  s->private_floats = aligned(std::max({attention, widest, 2 * columns})) + 64;
  const int64_t total = 16 + aligned(t * shape.hidden_size) + aligned(t * qkv) +
                        aligned(t * attended) + aligned(packed) + aligned(packed_down) +
                        s->num_threads * (s->private_floats + block);
  if ((int64_t)s->model->scratch.size() < total) {
    s->model->scratch.clear();
    s->model->scratch.resize((size_t)total);
  }
  float* at = (float*)(((uintptr_t)s->model->scratch.data() + 63) / 64 * 64);
  s->hidden = at;
  s->qkv = s->hidden + aligned(t * shape.hidden_size);
  s->attended = s->qkv + aligned(t * qkv);
  s->packed = (unsigned char*)(s->attended + aligned(t * attended));
  s->packed_down = s->packed + 4 * aligned(packed);
  s->private_scratch = (float*)(s->packed_down + 4 * aligned(packed_down));
  s->private_packed = (unsigned char*)(s->private_scratch + s->num_threads * s->private_floats);
  s->private_packed_bytes = 4 * block;
}

bool is_complete(const PmModel& model) {
  for (const PmModel::Layer& l : model.layers)
    if (!l.qkv || !l.o || !l.gate_up || !l.down || !l.input_norm || !l.post_norm) return false;
  return model.embedding && model.lm_head && model.final_norm && model.cos_table &&
         model.sin_table;
}

bool has_shape(const PmMatrix* matrix, int64_t n, int64_t k) {
  return matrix->n == n && matrix->k == k;
}

}  // namespace

}  // namespace pm

int pm_model_create(PmPool* pool, const PmModelShape* shape, PmModel** model) {
  *model = nullptr;
  if (shape->num_layers < 1 || shape->num_kv_heads < 1 || shape->head_dim < 2 ||
      shape->head_dim % 2 || shape->num_heads % shape->num_kv_heads)
    return PM_INVALID;
  PmModel* made = new (std::nothrow) PmModel();
  if (!made) return PM_MEMORY;
  made->pool = pool;
  made->shape = *shape;
  try {
    made->layers.resize((size_t)shape->num_layers);
  } catch (const std::bad_alloc&) {
    delete made;
    return PM_MEMORY;
  }
  *model = made;
  return PM_OK;
}

void pm_model_destroy(PmModel* model) { delete model; }

int pm_model_set_matrix(PmModel* model, int64_t role, int64_t layer, const PmMatrix* matrix) {
  const PmModelShape& s = model->shape;
  const int64_t heads = s.num_heads * s.head_dim, kv = s.num_kv_heads * s.head_dim;
  if (role < PM_EMBEDDING && (layer < 0 || layer >= s.num_layers)) return PM_INVALID;
  PmModel::Layer* l = role < PM_EMBEDDING ? &model->layers[(size_t)layer] : nullptr;
  switch (role) {
    case PM_QKV:
      l->qkv = matrix;
      return pm::has_shape(matrix, heads + 2 * kv, s.hidden_size) ? PM_OK : PM_INVALID;
    case PM_O:
      l->o = matrix;
      return pm::has_shape(matrix, s.hidden_size, heads) ? PM_OK : PM_INVALID;
    case PM_GATE_UP:
      l->gate_up = matrix;
      return pm::has_shape(matrix, pm::up_row(s.intermediate_size) + s.intermediate_size,
                           s.hidden_size)
                 ? PM_OK
                 : PM_INVALID;
    case PM_DOWN:
      l->down = matrix;
      return pm::has_shape(matrix, s.hidden_size, s.intermediate_size) ? PM_OK : PM_INVALID;
    case PM_EMBEDDING:
      model->embedding = matrix;
      return pm::has_shape(matrix, s.vocab_size, s.hidden_size) ? PM_OK : PM_INVALID;
    case PM_LM_HEAD:
      model->lm_head = matrix;
      return pm::has_shape(matrix, s.vocab_size, s.hidden_size) ? PM_OK : PM_INVALID;
  }
  return PM_INVALID;
}

int pm_model_set_vector(PmModel* model, int64_t vector, int64_t layer, const float* data) {
  if (vector < PM_FINAL_NORM && (layer < 0 || layer >= model->shape.num_layers))
    return PM_INVALID;
  PmModel::Layer* l = vector < PM_FINAL_NORM ? &model->layers[(size_t)layer] : nullptr;
  switch (vector) {
    case PM_INPUT_NORM: l->input_norm = data; return PM_OK;
    case PM_POST_NORM: l->post_norm = data; return PM_OK;
    case PM_QKV_BIAS: l->qkv_bias = data; return PM_OK;
    case PM_Q_NORM: l->q_norm = data; return PM_OK;
    case PM_K_NORM: l->k_norm = data; return PM_OK;
    case PM_FINAL_NORM: model->final_norm = data; return PM_OK;
    case PM_ROPE_COS: model->cos_table = data; return PM_OK;
    case PM_ROPE_SIN: model->sin_table = data; return PM_OK;
  }
  return PM_INVALID;
}

int pm_model_forward(PmModel* model, const PmBatch* batch, const PmKv* kv, float* logits,
                     float* maxima) {
  if (model->pool->team.is_forked()) return PM_FORKED;
  if (!pm::is_complete(*model)) return PM_INVALID;
  if (batch->num_tokens == 0) return PM_OK;
  try {
    const PmModelShape& shape = model->shape;
    const int threads = model->pool->team.size();
    const pm::KvLayout layout{kv->kind, kv->page_size, shape.num_kv_heads, shape.head_dim};
    pm::Step step{model,
                  batch,
                  kv,
                  layout,
                  logits,
                  maxima,
                  pm::AttentionPlan(batch, shape.num_heads, layout, shape.sliding_window, threads),
                  std::vector<pm::Phase>(
                      (size_t)(shape.num_layers * pm::PHASES_PER_LAYER + 4)),
                  threads,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  0,
                  nullptr,
                  0,
                  {}};
    step.last.choose(*batch);
    if (step.last.is_fewer && batch->num_sampled)
      step.last.plan.emplace(&step.last.batch, shape.num_heads, layout, shape.sliding_window,
                             threads);
    pm::lay_out(&step);
    model->pool->team.run(pm::run_member, &step);
  } catch (const std::bad_alloc&) {
    return PM_MEMORY;
  }
  return PM_OK;
}
