// y = x * W^T for integer weights with one scale per 32 inputs, x rounded to integers per group
// (pack.cpp). Exact integer dot products inside a group; one fused multiply-add chain over the
// groups per output, so the order is fixed whatever the tile.
#include "group_sums.h"

namespace pm {
namespace {

// R rows x one panel: more panels would be more streams of memory, and one row is fast enough
// because groups overlap. w: the panel; x: block packed by pack.cpp; y: first row and output.
template <int R, bool UINT4, int BYTES>
void tile(const unsigned char* w, const unsigned char* x, int64_t groups, float* y, int64_t stride,
          int64_t outputs, bool add) {
  constexpr int64_t GROUP_BYTES = UINT4 ? UINT4_GROUP_BYTES : INT8_GROUP_BYTES;
  constexpr int64_t SCALES_AT = UINT4 ? GROUP * PW / 2 : GROUP * PW;
  F acc[R][NV];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = F{};
  for (int64_t g = 0; g < groups; ++g, w += GROUP_BYTES, x += (BYTES * GROUP + 8) * R) {
    const float* input_scales = (const float*)(x + BYTES * GROUP * R);
    Sums<R> sums;
    group_sums<R, UINT4, BYTES>(w, x, sums);
    prefetch(w + SCALES_AT + PREFETCH_BYTES);
    if (UINT4) prefetch(w + SCALES_AT + 2 * PW + PREFETCH_BYTES);
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const uint16_t* at = (const uint16_t*)(w + SCALES_AT) + v * W;
      const F scale = load_half(at);
      const F low = UINT4 ? load_half(at + PW) : F{};
      PM_UNROLL for (int r = 0; r < R; ++r) {
        F& out = acc[r][v];
        out = fma(to_float(sums.lanes[r][v]), scale * splat(input_scales[r]), out);
        if (UINT4) out = fma(low, splat(input_scales[R + r]), out);
      }
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int v = 0; v < NV; ++v)
      put(y + r * stride, v * W, outputs, acc[r][v], add);
}

typedef void (*Tile)(const unsigned char*, const unsigned char*, int64_t, float*, int64_t, int64_t,
                     bool);
#if PM_W == 16
#define PM_TILES(U, B)                                           \
  {tile<1, U, B>, tile<2, U, B>, tile<3, U, B>, tile<4, U, B>, \
   tile<5, U, B>, tile<6, U, B>, tile<7, U, B>, tile<8, U, B>}
#else
#define PM_TILES(U, B) {tile<1, U, B>, tile<2, U, B>, tile<3, U, B>, tile<4, U, B>}
#endif
constexpr Tile TILES[2][2][FEW_INT_ROWS] = {
    {PM_TILES(false, (int)input_bytes(PM_INT8_FAST)), PM_TILES(false, 2)},
    {PM_TILES(true, (int)input_bytes(PM_UINT4_FAST)), PM_TILES(true, 2)}};
#undef PM_TILES

}  // namespace

void linear_panels_int(const PmMatrix* matrix, const unsigned char* packed,
                       const RowBlocks& blocks, int64_t first, int64_t last, bool add, float* y,
                       int64_t stride) {
  const Tile* tiles = TILES[is_uint4(matrix->kind)][input_bytes(matrix->kind) - 1];
  for (int64_t p = first; p < last; ++p)
    for (int64_t b = 0; b < blocks.num; ++b)
      tiles[blocks.rows(b) - 1](matrix->panel(p),
                                packed + block_offset(matrix->kind, blocks, b, matrix->k),
                                matrix->k / GROUP, y + blocks.start(b) * stride + p * PW, stride,
                                matrix->n - p * PW, add);
}

}  // namespace pm
