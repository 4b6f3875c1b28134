// The exact integer dot products of one group of inputs (32), for the tiles of linear_int.cpp:
// R packed rows (pack.cpp) times the NV vectors of a panel. Exact, so the order inside a group is
// free and every instruction set gives the same integers.
#pragma once
#include "kernels.h"

namespace pm {

constexpr int STEPS = GROUP / 4;  // four inputs per 32-bit lane

template <int R>
struct Sums {
  I lanes[R][NV];
};

// Vector v of a step's weights; asks for those some steps ahead.
PM_INLINE I load_weights(const unsigned char* w, int step, int v) {
  const unsigned char* at = w + (step * PW + v * W) * 4;
  if (v * W * 4 % 64 == 0) prefetch(at + PREFETCH_BYTES);
  return load_int((const int32_t*)at);
}

template <int R>
PM_INLINE void clear(Sums<R>& sums) {
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int v = 0; v < NV; ++v) sums.lanes[r][v] = I{};
}

#if defined(PM_ISA_AVX2) && !defined(__AVXVNNI__)
// Two 16-bit products are one instruction (vpmaddwd): 16-bit inputs cost no more than 8-bit ones
// next to signed bytes, whose sign vpmaddubsw could only take with a further instruction per row.

// Where sums grow one by one, in one register each: left alone, GCC adds 16 products as a tree,
// which needs 16 registers.
PM_INLINE __m256i kept(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
PM_INLINE __m256i pair_dot(I sum, __m256i weights, int32_t pair) {
  const __m256i products = _mm256_madd_epi16(weights, _mm256_set1_epi32(pair));
  return kept(_mm256_add_epi32((__m256i)sum, products));
}

// x: [STEPS][even, odd][R] pairs of 16-bit inputs; bytes 0 and 2, 1 and 3 of a lane
template <int R>
PM_INLINE void wide_int8(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
#pragma GCC unroll 2
  for (int step = 0; step < STEPS; ++step) {
    __m256i even[NV], odd[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const __m256i bytes = (__m256i)load_weights(w, step, v);
      even[v] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      odd[v] = _mm256_srai_epi16(bytes, 8);
    }
    PM_UNROLL for (int r = 0; r < R; ++r)
      PM_UNROLL for (int v = 0; v < NV; ++v)
        sums.lanes[r][v] = (I)pair_dot(sums.lanes[r][v], even[v], x[2 * step * R + r]);
    PM_UNROLL for (int r = 0; r < R; ++r)
      PM_UNROLL for (int v = 0; v < NV; ++v)
        sums.lanes[r][v] = (I)pair_dot(sums.lanes[r][v], odd[v], x[(2 * step + 1) * R + r]);
  }
}

template <int R>
PM_INLINE void wide_uint4(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  const __m256i mask = _mm256_set1_epi16(15);
  for (int step = 0; step < STEPS / 2; ++step) {
    __m256i quads[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) quads[v] = (__m256i)load_weights(w, step, v);
    PM_UNROLL for (int part = 0; part < 4; ++part) {  // low even, high even, low odd, high odd
      const int32_t* at = x + (2 * (step + part % 2 * (STEPS / 2)) + part / 2) * R;
      __m256i weights[NV];
      PM_UNROLL for (int v = 0; v < NV; ++v)
        weights[v] = _mm256_and_si256(_mm256_srli_epi16(quads[v], 4 * part), mask);
      PM_UNROLL for (int r = 0; r < R; ++r)
        PM_UNROLL for (int v = 0; v < NV; ++v)
          sums.lanes[r][v] = (I)pair_dot(sums.lanes[r][v], weights[v], at[r]);
    }
  }
}

// x: [STEPS][R] x 4 bytes. A 16-bit lane holds all of a group: 8 * 2 * 15 * 127 = 30480.
template <int R>
PM_INLINE void narrow_uint4(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  const __m256i mask = _mm256_set1_epi8(15);
  PM_UNROLL for (int step = 0; step < STEPS / 2; ++step) {
    __m256i low[NV], high[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const __m256i quads = (__m256i)load_weights(w, step, v);
      low[v] = _mm256_and_si256(quads, mask);
      high[v] = _mm256_and_si256(_mm256_srli_epi16(quads, 4), mask);
    }
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const __m256i first = _mm256_set1_epi32(x[step * R + r]);
      const __m256i second = _mm256_set1_epi32(x[(step + STEPS / 2) * R + r]);
      PM_UNROLL for (int v = 0; v < NV; ++v) {
        __m256i sum = (__m256i)sums.lanes[r][v];
        sum = kept(_mm256_add_epi16(sum, _mm256_maddubs_epi16(low[v], first)));
        sum = kept(_mm256_add_epi16(sum, _mm256_maddubs_epi16(high[v], second)));
        sums.lanes[r][v] = (I)sum;
      }
    }
  }
  PM_UNROLL for (int r = 0; r < R; ++r)
    PM_UNROLL for (int v = 0; v < NV; ++v)
      sums.lanes[r][v] =
          (I)_mm256_madd_epi16((__m256i)sums.lanes[r][v], _mm256_set1_epi16(1));
}

template <int R, bool UINT4, int BYTES>
PM_INLINE void group_sums(const unsigned char* w, const unsigned char* x, Sums<R>& sums) {
  clear(sums);
  if (!UINT4)
    wide_int8<R>(w, (const int32_t*)x, sums);
  else if (BYTES == 2)
    wide_uint4<R>(w, (const int32_t*)x, sums);
  else
    narrow_uint4<R>(w, (const int32_t*)x, sums);
}

#else
// x: [BYTES][STEPS][R] x 4 bytes, the high digits first. Two-digit activations take two passes: the
// high digits, times 128, then the low ones. The largest sum, 32 * 255 * 16383, fits 32 bits.

template <int R>
PM_INLINE void add_int8(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  PM_UNROLL_VECTOR for (int step = 0; step < STEPS; ++step) {
    I weights[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) weights[v] = load_weights(w, step, v);
    PM_UNROLL for (int r = 0; r < R; ++r) {
      const I input = splat_int(x[step * R + r]);
      PM_UNROLL for (int v = 0; v < NV; ++v)
        sums.lanes[r][v] = dot4_signed(sums.lanes[r][v], weights[v], input);
    }
  }
}

template <int R>
PM_INLINE void add_uint4(const unsigned char* w, const int32_t* x, Sums<R>& sums) {
  const I low_nibbles = splat_int(0x0F0F0F0F);
  PM_UNROLL_VECTOR for (int step = 0; step < STEPS / 2; ++step) {
    I low[NV], high[NV];
    PM_UNROLL for (int v = 0; v < NV; ++v) {
      const I pair = load_weights(w, step, v);
      low[v] = pair & low_nibbles;
      high[v] = (pair >> 4) & low_nibbles;
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

template <int R, bool UINT4, int BYTES>
PM_INLINE void group_sums(const unsigned char* w, const unsigned char* x, Sums<R>& sums) {
  const int32_t* input_sums = (const int32_t*)(x + BYTES * GROUP * R) + R;
  if (BYTES == 2) {
    clear(sums);
    add_group<R, UINT4>(w, x, sums);
  }
  PM_UNROLL for (int r = 0; r < R; ++r) {
    const I start = UINT4 || SIGNED_OFFSET == 0 ? I{} : splat_int(-SIGNED_OFFSET * input_sums[r]);
    PM_UNROLL for (int v = 0; v < NV; ++v)
      sums.lanes[r][v] = BYTES == 2 ? (sums.lanes[r][v] << 7) + start : start;
  }
  add_group<R, UINT4>(w, x + (BYTES - 1) * GROUP * R, sums);
}
#endif

}  // namespace pm
