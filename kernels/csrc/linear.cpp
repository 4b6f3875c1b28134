// y = x * W^T for float weights. One fused multiply-add chain per output, sequential in k,
// whatever the tile. 16-bit weights are widened exactly: the bits are those of float32 weights of
// the same values.
#include "kernels.h"

namespace pm {
namespace {

struct Float32 {
  typedef float Number;
  static PM_INLINE F read(const float* p) { return load(p); }
};
struct BFloat16 {
  typedef uint16_t Number;
  static PM_INLINE F read(const uint16_t* p) { return load_bf16(p); }
};
struct Float16 {
  typedef uint16_t Number;
  static PM_INLINE F read(const uint16_t* p) { return load_half(p); }
};

// R rows x P panels. w: first panel; x: block packed [k][R]; y: first row and output of the tile.
template <typename T, int R, int P>
void tile(const unsigned char* w, int64_t panel_bytes, const float* x, int64_t k_count, float* y,
          int64_t stride, int64_t outputs, bool add) {
  typedef typename T::Number Number;
  constexpr int LINE = 64 / sizeof(Number);
  F acc[R][P][NV];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int p = 0; p < P; ++p)
      PM_UNROLL for (int v = 0; v < NV; ++v) acc[r][p][v] = F{};
  for (int64_t k = 0; k < k_count; ++k) {
    F weights[P][NV];
    PM_UNROLL for (int p = 0; p < P; ++p) {
      const Number* at = (const Number*)(w + p * panel_bytes) + k * PW;
      PM_UNROLL for (int v = 0; v < NV; ++v) {
        weights[p][v] = T::read(at + v * W);
        if ((v * W) % LINE == 0) prefetch((const char*)(at + v * W) + PREFETCH_BYTES);
      }
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const F input = splat(x[k * R + r]);
      PM_UNROLL for (int p = 0; p < P; ++p)
        PM_UNROLL for (int v = 0; v < NV; ++v)
          acc[r][p][v] = fma(input, weights[p][v], acc[r][p][v]);
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int p = 0; p < P; ++p)
      PM_UNROLL for (int v = 0; v < NV; ++v)
        put(y + r * stride, (p * NV + v) * W, outputs, acc[r][p][v], add);
}

typedef void (*Tile)(const unsigned char*, int64_t, const float*, int64_t, float*, int64_t,
                     int64_t, bool);

// Few rows: several panels at once hide the latency of the chains; at most 16 accumulators.
constexpr int panels_per_tile(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 8 / NV : rows == 3 && NV == 2 ? 2 : 1;
}
constexpr int at_most(int panels, int rows) {
  return panels < panels_per_tile(rows) ? panels : panels_per_tile(rows);
}

template <typename T>
Tile tile_of(int64_t rows, int64_t panels) {
#define PM_TILES(R)                                                             \
  {                                                                             \
    tile<T, R, 1>, tile<T, R, at_most(2, R)>,                   \
        tile<T, R, at_most(3, R)>, tile<T, R, at_most(4, R)>,   \
  }
  static constexpr Tile tiles[FLOAT_ROWS][4] = {
      PM_TILES(1), PM_TILES(2), PM_TILES(3),  PM_TILES(4),  PM_TILES(5),  PM_TILES(6),
#if PM_W == 16
      PM_TILES(7), PM_TILES(8), PM_TILES(9), PM_TILES(10), PM_TILES(11), PM_TILES(12),
#endif
  };
#undef PM_TILES
  return tiles[rows - 1][panels - 1];
}

template <typename T>
void run(const PmMatrix* matrix, const float* packed, const RowBlocks& blocks,
                int64_t first, int64_t last, bool add, float* y, int64_t stride) {
  const int64_t most = panels_per_tile((int)blocks.rows(0));  // the largest block decides
  for (int64_t p = first; p < last;) {
    const int64_t panels = last - p < most ? last - p : most;
    for (int64_t b = 0; b < blocks.num; ++b) {
      const int64_t rows = blocks.rows(b), start = blocks.start(b);
      tile_of<T>(rows, panels)(matrix->panel(p), matrix->panel_bytes,
                                       packed + start * matrix->k, matrix->k,
                                       y + start * stride + p * PW, stride, matrix->n - p * PW,
                                       add);
    }
    p += panels;
  }
}

}  // namespace

void linear_panels(const PmMatrix* matrix, const unsigned char* packed, const RowBlocks& blocks,
                   int64_t first, int64_t last, bool add, float* y, int64_t stride) {
  const float* rows = (const float*)packed;
  switch (matrix->kind) {
    case PM_F32: return run<Float32>(matrix, rows, blocks, first, last, add, y, stride);
    case PM_BF16: return run<BFloat16>(matrix, rows, blocks, first, last, add, y, stride);
    case PM_F16: return run<Float16>(matrix, rows, blocks, first, last, add, y, stride);
    default: return linear_panels_int(matrix, packed, blocks, first, last, add, y, stride);
  }
}

}  // namespace pm
