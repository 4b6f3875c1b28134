// y = x * W^T. One fused multiply-add chain per output, sequential in k, whatever the tile.
#include <cstdlib>

#include "kernels.h"
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace pm {
namespace {

constexpr int64_t HUGE_PAGE = int64_t(2) << 20;
constexpr int PREFETCH_BYTES = 2048;  // ahead in each weight stream

PM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// R rows x P panels. w: first panel; x: block packed [k][R]; y: first row and output of the tile.
template <int R, int P, bool STREAM>
void tile(const float* w, int64_t panel_floats, const float* x, int64_t k_count, float* y,
          int64_t stride, int64_t outputs, bool add) {
  F acc[R][P][NV];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int p = 0; p < P; ++p)
      PM_UNROLL for (int v = 0; v < NV; ++v) acc[r][p][v] = F{};
  for (int64_t k = 0; k < k_count; ++k) {
    F weights[P][NV];
    PM_UNROLL for (int p = 0; p < P; ++p) {
      const float* at = w + p * panel_floats + k * PW;
      PM_UNROLL for (int v = 0; v < NV; ++v) {
        weights[p][v] = load(at + v * W);
        if (STREAM && (v * W) % 16 == 0) prefetch((const char*)(at + v * W) + PREFETCH_BYTES);
      }
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      F input = splat(x[k * R + r]);
      PM_UNROLL for (int p = 0; p < P; ++p)
        PM_UNROLL for (int v = 0; v < NV; ++v)
          acc[r][p][v] = fma(input, weights[p][v], acc[r][p][v]);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int p = 0; p < P; ++p)
      PM_UNROLL for (int v = 0; v < NV; ++v) {
        const int64_t n = (p * NV + v) * W;
        float* at = y + r * stride + n;
        if (n + W <= outputs) {
          store(at, add ? load(at) + acc[r][p][v] : acc[r][p][v]);
        } else if (n < outputs) {
          const F old = add ? load_first(at, outputs - n) : F{};
          store_first(at, add ? old + acc[r][p][v] : acc[r][p][v], outputs - n);
        }
      }
}

typedef void (*Tile)(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, bool);

// Few rows: several panels at once hide the latency of the chains.
constexpr int panels_per_tile(int rows) { return rows <= 2 ? 4 : rows == 3 ? 2 : 1; }

template <bool STREAM>
Tile tile_of(int64_t rows, int64_t panels) {
#define PM_TILES(R)                                                                         \
  {                                                                                         \
    tile<R, 1, STREAM>, panels_per_tile(R) >= 2 ? tile<R, 2, STREAM> : nullptr,             \
        panels_per_tile(R) >= 4 ? tile<R, (R <= 2 ? 3 : 1), STREAM> : nullptr,              \
        panels_per_tile(R) >= 4 ? tile<R, (R <= 2 ? 4 : 1), STREAM> : nullptr               \
  }
  static constexpr Tile tiles[MAX_ROWS][4] = {
      PM_TILES(1), PM_TILES(2), PM_TILES(3),  PM_TILES(4),  PM_TILES(5),  PM_TILES(6),
#if PM_W == 16
      PM_TILES(7), PM_TILES(8), PM_TILES(9), PM_TILES(10), PM_TILES(11), PM_TILES(12),
#endif
  };
#undef PM_TILES
  return tiles[rows - 1][panels - 1];
}

template <bool STREAM>
void run_panels(const PmMatrix* matrix, const float* packed, const RowBlocks& blocks,
                int64_t first, int64_t last, bool add, float* y, int64_t stride) {
  const int64_t panel_floats = matrix->panel_bytes / (int64_t)sizeof(float);
  const int64_t most = panels_per_tile((int)blocks.rows(0));
  for (int64_t p = first; p < last;) {
    const int64_t panels = last - p < most ? last - p : most;
    const float* w = (const float*)matrix->panel(p);
    for (int64_t b = 0; b < blocks.num; ++b) {
      const int64_t rows = blocks.rows(b), start = blocks.start(b);
      // A smaller last block may allow more panels than the first: never needed, `most` holds.
      tile_of<STREAM>(rows, panels)(w, panel_floats, packed + start * matrix->k, matrix->k,
                                    y + start * stride + p * PW, stride, matrix->n - p * PW, add);
    }
    p += panels;
  }
}

}  // namespace

bool matrix_allocate(PmMatrix* matrix) {
  matrix->num_panels = (matrix->n + PW - 1) / PW;
  matrix->panel_bytes = matrix->k * PW * (int64_t)sizeof(float);
  const int64_t bytes = matrix->num_panels * matrix->panel_bytes;
#if defined(__unix__) || defined(__APPLE__)
  // Huge pages: a step reads all weights once, and a TLB miss per 4 KiB would show.
  matrix->mapping_bytes = bytes + HUGE_PAGE + PREFETCH_BYTES;
  void* p = mmap(nullptr, (size_t)matrix->mapping_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANON, -1, 0);
  if (p == MAP_FAILED) return false;
  matrix->mapping = p;
  matrix->data = (unsigned char*)(((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
  madvise(matrix->data, (size_t)bytes, MADV_HUGEPAGE);
#endif
#else
  matrix->mapping_bytes = bytes + 64 + PREFETCH_BYTES;
  matrix->mapping = std::calloc(1, (size_t)matrix->mapping_bytes);
  if (!matrix->mapping) return false;
  matrix->data = (unsigned char*)(((uintptr_t)matrix->mapping + 63) / 64 * 64);
#endif
  return true;
}

void matrix_free(PmMatrix* matrix) {
#if defined(__unix__) || defined(__APPLE__)
  munmap(matrix->mapping, (size_t)matrix->mapping_bytes);
#else
  std::free(matrix->mapping);
#endif
}

void matrix_fill(PmMatrix* matrix, int64_t row, int64_t rows, const float* data, int64_t first,
                 int64_t last) {
  const int64_t k_count = matrix->k;
  for (int64_t p = first; p < last; ++p) {
    float* panel = (float*)(matrix->data + p * matrix->panel_bytes);
    for (int64_t lane = 0; lane < PW; ++lane) {
      const int64_t source = p * PW + lane - row;
      if (source < 0 || source >= rows) continue;
      const float* x = data + source * k_count;
      for (int64_t k = 0; k < k_count; ++k) panel[k * PW + lane] = x[k];
    }
  }
}

void matrix_row(const PmMatrix* matrix, int64_t row, float* out) {
  const float* panel = (const float*)matrix->panel(row / PW) + row % PW;
  for (int64_t k = 0; k < matrix->k; ++k) out[k] = panel[k * PW];
}

int64_t packed_bytes(int64_t, int64_t m, int64_t k) { return m * k * (int64_t)sizeof(float); }

void pack_columns(int64_t, const float* x, int64_t k0, int64_t k1, int64_t, int64_t index,
                  int64_t rows, unsigned char* block) {
  float* out = (float*)block + index;
  for (int64_t k = k0; k < k1; ++k) out[k * rows] = x[k - k0];
}

void linear_panels(const PmMatrix* matrix, const unsigned char* packed, const RowBlocks& blocks,
                   int64_t first, int64_t last, bool add, float* y, int64_t stride) {
  // One pass over the weights is bound by memory: prefetch. Many passes find them in the cache.
  if (blocks.num == 1)
    run_panels<true>(matrix, (const float*)packed, blocks, first, last, add, y, stride);
  else
    run_panels<false>(matrix, (const float*)packed, blocks, first, last, add, y, stride);
}

}  // namespace pm
