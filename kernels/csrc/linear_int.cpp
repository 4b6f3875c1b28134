// y = x * W^T for integer weights with one scale per 32 inputs, x rounded to integers per group
// (pack.cpp). Exact integer dot products inside a group; one fused multiply-add chain over the
// groups per output, so the order is fixed whatever the tile.
//
// Two-digit activations take two passes over a group: the high digits, times 128, then the low
// ones. The largest sum, 32 * 255 * 16383, fits 32 bits.
#include "kernels.h"

namespace pm {
namespace {

constexpr int STEPS = GROUP / 4;  // four inputs per 32-bit lane

template <int R>
struct Sums {
  I lanes[R][NV];
};

PM_INLINE I load_int(const unsigned char* p) {
  I v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// sums += dot products of one group of signed bytes
template <int R>
PM_INLINE void add_int8(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  PM_UNROLL_VECTOR for (int step = 0; step < STEPS; ++step) {
    I weights[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const unsigned char* at = w + (step * PW + v * W) * 4;
      weights[v] = load_int(at);
      if (v * W * 4 % 64 == 0) prefetch(at + PREFETCH_BYTES);
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I input = splat_int(x[step * R + r]);
      PM_UNROLL for (int v = 0; v < NV; ++v)
        sums.lanes[r][v] = dot4_signed(sums.lanes[r][v], weights[v], input);
    }
  }
}

// sums += dot products of one group of nibbles
template <int R>
PM_INLINE void add_uint4(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  const I low_nibbles = splat_int(0x0F0F0F0F);
  PM_UNROLL_VECTOR for (int step = 0; step < STEPS / 2; ++step) {
    I low[NV], high[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const unsigned char* at = w + (step * PW + v * W) * 4;
      const I pair = load_int(at);
      low[v] = pair & low_nibbles;
      high[v] = (pair >> 4) & low_nibbles;
      if (v * W * 4 % 64 == 0) prefetch(at + PREFETCH_BYTES);
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I first = splat_int(x[step * R + r]);
      const I second = splat_int(x[(step + STEPS / 2) * R + r]);
      PM_UNROLL for (int v = 0; v < NV; ++v) {
        I& lanes = sums.lanes[r][v];
        lanes = dot4_unsigned(lanes, low[v], first);
        lanes = dot4_unsigned(lanes, high[v], second);
      }
    }
  }
}

template <int R, bool UINT4>
PM_INLINE void add_group(const unsigned char* w, const unsigned char* x, Sums<R>& sums) {
  if (UINT4)
    add_uint4<R>(w, (const int32_t*)x, sums);
  else
    add_int8<R>(w, (const int32_t*)x, sums);
}

// R rows x one panel: more panels would be more streams of memory, and one row is fast enough
// because groups overlap. w: the panel; x: block packed by pack.cpp; y: first row and output.
template <int R, bool UINT4, int DIGITS>
void tile(const unsigned char* w, const unsigned char* x, int64_t groups, float* y, int64_t stride,
          int64_t outputs, bool add) {
  constexpr int64_t GROUP_BYTES = UINT4 ? UINT4_GROUP_BYTES : INT8_GROUP_BYTES;
  constexpr int64_t SCALES_AT = UINT4 ? GROUP * PW / 2 : GROUP * PW;
  F acc[R][NV];
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = F{};
  for (int64_t g = 0; g < groups; ++g, w += GROUP_BYTES, x += (DIGITS * GROUP + 8) * R) {
    const float* input_scales = (const float*)(x + DIGITS * GROUP * R);
    Sums<R> sums;
    if (DIGITS == 2) {
      PM_UNROLL for (int r = 0; r < R; ++r)
        PM_UNROLL for (int v = 0; v < NV; ++v) sums.lanes[r][v] = I{};
      add_group<R, UINT4>(w, x, sums);
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I start = UINT4 || SIGNED_OFFSET == 0
                          ? I{}
                          : splat_int(-SIGNED_OFFSET * ((const int32_t*)input_scales)[R + r]);
      PM_UNROLL for (int v = 0; v < NV; ++v) sums.lanes[r][v] = DIGITS == 2 ? (sums.lanes[r][v] << 7) + start : start;
    }
    add_group<R, UINT4>(w, x + (DIGITS - 1) * GROUP * R, sums);
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
#define PM_TILES(U, D) \
  {tile<1, U, D>, tile<2, U, D>, tile<3, U, D>, tile<4, U, D>, tile<5, U, D>, tile<6, U, D>}
#else
#define PM_TILES(U, D) {tile<1, U, D>, tile<2, U, D>, tile<3, U, D>}
#endif
constexpr Tile TILES[2][2][INT_ROWS] = {{PM_TILES(false, 1), PM_TILES(false, 2)},
                                        {PM_TILES(true, 1), PM_TILES(true, 2)}};
#undef PM_TILES

}  // namespace

void linear_panels_int(const PmMatrix* matrix, const unsigned char* packed,
                       const RowBlocks& blocks, int64_t first, int64_t last, bool add, float* y,
                       int64_t stride) {
  const Tile* tiles = TILES[is_uint4(matrix->kind)][num_digits(matrix->kind) - 1];
  for (int64_t p = first; p < last; ++p)
    for (int64_t b = 0; b < blocks.num; ++b)
      tiles[blocks.rows(b) - 1](matrix->panel(p),
                                packed + block_offset(matrix->kind, blocks, b, matrix->k),
                                matrix->k / GROUP, y + blocks.start(b) * stride + p * PW, stride,
                                matrix->n - p * PW, add);
}

}  // namespace pm
