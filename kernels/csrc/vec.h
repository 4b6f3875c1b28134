// Vectors of W floats. The same functions for AVX-512, AVX2+FMA (with or without AVX-VNNI), NEON
// (with or without the dot product extension) and plain C++ (GCC and Clang vector extensions),
// chosen when the library is compiled; one build holds exactly one of them.
//
// Compiled with -ffp-contract=off: a multiply and an add are fused exactly where fma() says so,
// so no two code paths of a build can differ by what the compiler made of them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(PM_ISA_NEON)
#include <arm_neon.h>
#endif

// PM_W floats a vector, PM_NV vectors a panel of weights.
#if defined(PM_ISA_AVX512)
#define PM_W 16
#define PM_NV 2
#define PM_HAS_32_REGISTERS 1
#define PM_ISA_NAME "avx512"
#elif defined(PM_ISA_AVX2)
#define PM_W 8
#define PM_NV 2
#define PM_HAS_32_REGISTERS 0
#if defined(__AVXVNNI__)
#define PM_ISA_NAME "avxvnni"
#else
#define PM_ISA_NAME "avx2"
#endif
#elif defined(PM_ISA_NEON)
#define PM_W 4
#define PM_NV 4
#define PM_HAS_32_REGISTERS 1
#if defined(__ARM_FEATURE_DOTPROD)
#define PM_ISA_NAME "neon-dot"
#else
#define PM_ISA_NAME "neon"
#endif
#else
#define PM_W 4
#define PM_NV 2
#define PM_HAS_32_REGISTERS 0
#define PM_IS_PORTABLE 1
#define PM_ISA_NAME "portable"
#endif

#define PM_INLINE inline __attribute__((always_inline))
#define PM_UNROLL _Pragma("GCC unroll 64")
#if defined(PM_IS_PORTABLE)
#define PM_UNROLL_VECTOR  // the portable build: small code and a short compilation
#else
#define PM_UNROLL_VECTOR PM_UNROLL
#endif

namespace pm {

constexpr int W = PM_W;
typedef float F __attribute__((vector_size(4 * PM_W)));
typedef int32_t I __attribute__((vector_size(4 * PM_W)));

PM_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PM_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
PM_INLINE F splat(float x) { return x - F{}; }
PM_INLINE I splat_int(int32_t x) { return x - I{}; }

// x in a register: else compilers read a constant from memory wherever it is used.
PM_INLINE F in_register(F x) {
#if defined(PM_ISA_AVX512)
  asm("" : "+v"(x));
#endif
  return x;
}

PM_INLINE I load_int(const void* p) {
  I v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PM_INLINE void store_int(void* p, I v) { std::memcpy(p, &v, sizeof v); }

PM_INLINE I lane_index() {
#if PM_W == 16
  return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif PM_W == 8
  return I{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return I{0, 1, 2, 3};
#endif
}

// The first n lanes, 0 <= n <= W; the other lanes are 0 and their memory is not touched.
PM_INLINE F load_first(const float* p, int64_t n) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(PM_ISA_AVX2)
  return (F)_mm256_maskload_ps(p, (__m256i)(lane_index() < splat_int((int32_t)n)));
#else
  if (n >= W) return load(p);
  F v{};
  std::memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
#endif
}
PM_INLINE void store_first(float* p, F v, int64_t n) {
#if defined(PM_ISA_AVX512)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#elif defined(PM_ISA_AVX2)
  _mm256_maskstore_ps(p, (__m256i)(lane_index() < splat_int((int32_t)n)), (__m256)v);
#else
  if (n >= W) return store(p, v);
  std::memcpy(p, &v, (size_t)n * sizeof(float));
#endif
}

PM_INLINE F fma(F a, F b, F c) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PM_ISA_AVX2)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PM_ISA_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
// mask lanes are 0 or -1
PM_INLINE F select(I mask, F yes, F no) {
  return (F)((mask & (I)yes) | (~mask & (I)no));
}
// Lane i of yes where bit i is set, else of no.
PM_INLINE F select_bits(uint32_t bits, F yes, F no) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_mask_blend_ps((__mmask16)bits, (__m512)no, (__m512)yes);
#else
  const I one = splat_int(1);
  return select(((splat_int((int32_t)bits) >> lane_index()) & one) == one, yes, no);
#endif
}
// Where either is NaN: b. So a NaN in b is kept.
PM_INLINE F max(F a, F b) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(PM_ISA_AVX2)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

// Horizontal operations: a fixed tree, lane i with lane i + W/2 first.
#if defined(PM_ISA_AVX512) || defined(PM_ISA_AVX2)
template <typename Pair>
PM_INLINE float fold_lanes(F v, Pair pair) {
#if defined(PM_ISA_AVX512)
  const __m256 eight = pair(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 eight = (__m256)v;
#endif
  const __m256 four = pair(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = pair(four, _mm256_permute_ps(four, 0x0E));
  return _mm256_cvtss_f32(pair(two, _mm256_permute_ps(two, 0x01)));
}
PM_INLINE float sum_lanes(F v) {
  return fold_lanes(v, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
PM_INLINE float max_lanes(F v) {
  return fold_lanes(v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
#else
PM_INLINE float sum_lanes(F v) {
  float x[W];
  store(x, v);
  for (int half = W / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  return x[0];
}
PM_INLINE float max_lanes(F v) {
  float x[W];
  store(x, v);
  for (int half = W / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}
#endif

// Lane i < n: what fold_lanes gives of rows[i] (W rows, those past n any numbers).
#if defined(PM_ISA_AVX512)
template <typename Pair>
PM_INLINE __m512 fold_rows(const float (*rows)[W], int64_t n, Pair pair) {
  const auto row = [&](int i) { return _mm512_loadu_ps(rows[i]); };
  const auto halves = [&](__m512 a, __m512 b) {
    return pair(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  const auto quarters = [&](__m512 a, __m512 b) {
    return pair(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  if (n <= 4) {
    __m512 v = quarters(halves(row(0), row(1)), halves(row(2), row(3)));
    v = pair(v, _mm512_permute_ps(v, 0x0E));
    v = pair(v, _mm512_permute_ps(v, 0x01));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
                                 v);
  }
  __m512 four[4];  // [i]: four lanes each of the rows i, i + 4, i + 8, i + 12
  PM_UNROLL for (int i = 0; i < 4; ++i)
    four[i] = quarters(halves(row(i), row(i + 4)), halves(row(i + 8), row(i + 12)));
  const auto two = [&](__m512 a, __m512 b) {
    return pair(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  };
  const __m512 a = two(four[0], four[1]), b = two(four[2], four[3]);
  return pair(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
PM_INLINE F sum_rows(const float (*rows)[W], int64_t n) {
  return (F)fold_rows(rows, n, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
PM_INLINE F max_rows(const float (*rows)[W], int64_t n) {
  return (F)fold_rows(rows, n, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
#else
PM_INLINE F sum_rows(const float (*rows)[W], int64_t n) {
  F v{};
  for (int64_t i = 0; i < n; ++i) v[i] = sum_lanes(load(rows[i]));
  return v;
}
PM_INLINE F max_rows(const float (*rows)[W], int64_t n) {
  F v{};
  for (int64_t i = 0; i < n; ++i) v[i] = max_lanes(load(rows[i]));
  return v;
}
#endif

// Exact, so in whatever order.
#if defined(PM_ISA_AVX2)
template <typename Pair>
PM_INLINE int32_t fold_integers(I v, Pair pair) {
  const __m256i eight = (__m256i)v;
  const __m128i four = pair(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = pair(four, _mm_shuffle_epi32(four, 0x0E));
  return _mm_cvtsi128_si32(pair(two, _mm_shuffle_epi32(two, 0x01)));
}
#endif
PM_INLINE int32_t sum_integers(I v) {
#if defined(PM_ISA_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(PM_ISA_AVX2)
  return fold_integers(v, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
#elif defined(PM_ISA_NEON)
  return vaddvq_s32((int32x4_t)v);
#else
  return v[0] + v[1] + v[2] + v[3];
#endif
}
PM_INLINE int32_t max_integers(I v) {
#if defined(PM_ISA_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(PM_ISA_AVX2)
  return fold_integers(v, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
#elif defined(PM_ISA_NEON)
  return vmaxvq_s32((int32x4_t)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < W; ++i) largest = largest > v[i] ? largest : v[i];
  return largest;
#endif
}

// e^x to about 1 ulp (Cephes expf coefficients). Below -87 it is e^-87, above 88 it is e^88; NaN
// stays NaN.
PM_INLINE F exp(F x) {
  const F low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);  // 1.5 * 2^23
  F y = select(x < low, low, x);
  y = select(y > high, high, y);
  F t = fma(y, splat(1.44269504088896341f), magic);  // the integer lies in the low bits of t
  F n = t - magic;
  F r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  F e = (F)((I)p + ((I)t << 23));
  return select(x == x, e, x);
}

PM_INLINE F to_float(I v) { return __builtin_convertvector(v, F); }

// W 16-bit numbers, exactly widened.
PM_INLINE F load_bf16(const uint16_t* p) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(PM_ISA_AVX2)
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(PM_ISA_NEON)
  return (F)vshll_n_u16(vld1_u16(p), 16);
#else
  I v;
  for (int i = 0; i < W; ++i) v[i] = (int32_t)((uint32_t)p[i] << 16);
  return (F)v;
#endif
}
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
  if (rest >= 0x7C00) {  // infinity, NaN
    const uint32_t bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  if (rest < 0x400) return (sign ? -1.0f : 1.0f) * (float)rest * 5.9604644775390625e-8f;
  const uint32_t bits = sign | ((rest << 13) + 0x38000000);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
PM_INLINE F load_half(const uint16_t* p) {
#if defined(PM_ISA_AVX512)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(PM_ISA_AVX2)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(PM_ISA_NEON)
  return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  F v;
  for (int i = 0; i < W; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// Per 32-bit lane: acc + the dot product of four bytes, exact. x is signed, -127 .. 127. Unsigned
// weights are 0 .. WEIGHT_LIMIT. Signed weights are any byte and lie as w + SIGNED_OFFSET; the caller starts
// acc at -SIGNED_OFFSET * (the sum of x).
#if defined(PM_ISA_AVX512) || defined(__AVXVNNI__)
constexpr int SIGNED_OFFSET = 128;  // vpdpbusd takes unsigned weights only
constexpr float WEIGHT_LIMIT = 255.0f;  // the largest unsigned weight
#else
constexpr int SIGNED_OFFSET = 0;
constexpr float WEIGHT_LIMIT = 127.0f;
#endif
#if defined(PM_ISA_NEON)
PM_INLINE I dot4_signed(I acc, I w, I x) {
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
  return (I)vdotq_s32((int32x4_t)acc, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (I)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));  // at most 2 * 128 * 127 per pair
#endif
}
PM_INLINE I dot4_unsigned(I acc, I w, I x) { return dot4_signed(acc, w, x); }
#else
PM_INLINE I dot4_unsigned(I acc, I w, I x) {
#if defined(PM_ISA_AVX512)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#elif defined(PM_ISA_AVX2)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);  // at most 2 * 127 * 127
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int byte = 0; byte < 4; ++byte)
    acc += ((w >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24);
  return acc;
#endif
}
PM_INLINE I dot4_signed(I acc, I w, I x) {
#if defined(PM_ISA_AVX512) || defined(__AVXVNNI__)
  return dot4_unsigned(acc, w, x);
#elif defined(PM_ISA_AVX2)
  const __m256i magnitude = _mm256_abs_epi8((__m256i)w);  // at most 2 * 128 * 127 per pair
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8((__m256i)x, (__m256i)w));
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int byte = 0; byte < 4; ++byte)
    acc += ((w << (24 - 8 * byte)) >> 24) * ((x << (24 - 8 * byte)) >> 24);
  return acc;
#endif
}
#endif

// The low bytes of W lanes.
PM_INLINE void store_bytes(int8_t* p, I v) {
#if defined(PM_ISA_AVX512)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(PM_ISA_AVX2)
  const __m256i low = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400));
  const __m128i first = _mm256_castsi256_si128(low), second = _mm256_extracti128_si256(low, 1);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(first, second));
#elif defined(PM_ISA_NEON)
  const int16x4_t narrow = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
  std::memcpy(p, &bytes, W);
#else
  for (int i = 0; i < W; ++i) p[i] = (int8_t)v[i];
#endif
}

// The bytes of W columns of four rows side by side: lane j is rows[0][j], .., rows[3][j].
PM_INLINE void interleave(const unsigned char* const* rows, int64_t offset, int32_t* out) {
#if defined(PM_ISA_AVX512)
  const __m128i a = _mm_loadu_si128((const __m128i*)(rows[0] + offset));
  const __m128i b = _mm_loadu_si128((const __m128i*)(rows[1] + offset));
  const __m128i c = _mm_loadu_si128((const __m128i*)(rows[2] + offset));
  const __m128i d = _mm_loadu_si128((const __m128i*)(rows[3] + offset));
  const __m128i ab = _mm_unpacklo_epi8(a, b), ab_high = _mm_unpackhi_epi8(a, b);
  const __m128i cd = _mm_unpacklo_epi8(c, d), cd_high = _mm_unpackhi_epi8(c, d);
  _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi16(ab, cd));
  _mm_storeu_si128((__m128i*)out + 1, _mm_unpackhi_epi16(ab, cd));
  _mm_storeu_si128((__m128i*)out + 2, _mm_unpacklo_epi16(ab_high, cd_high));
  _mm_storeu_si128((__m128i*)out + 3, _mm_unpackhi_epi16(ab_high, cd_high));
#elif defined(PM_ISA_AVX2)
  const __m128i a = _mm_loadl_epi64((const __m128i*)(rows[0] + offset));
  const __m128i b = _mm_loadl_epi64((const __m128i*)(rows[1] + offset));
  const __m128i c = _mm_loadl_epi64((const __m128i*)(rows[2] + offset));
  const __m128i d = _mm_loadl_epi64((const __m128i*)(rows[3] + offset));
  const __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
  _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi16(ab, cd));
  _mm_storeu_si128((__m128i*)out + 1, _mm_unpackhi_epi16(ab, cd));
#else
  for (int j = 0; j < W; ++j) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= (uint32_t)rows[i][offset + j] << (8 * i);
    out[j] = (int32_t)word;
  }
#endif
}

// W rows of W floats (rows[i][offset ..]) into columns: out[j * stride + i] = rows[i][offset + j],
// the bits of `flip` inverted.
PM_INLINE void transpose(const float* const* rows, int64_t offset, float* out, int64_t stride,
                         I flip = I{}) {
#if defined(PM_ISA_AVX512)
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = (__m512)(load_int(rows[i] + offset) ^ flip);
  for (int i = 0; i < 16; i += 4) {
    __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  // t[4 * q + j] holds columns j, j + 4, j + 8, j + 12 of rows 4q .. 4q + 3
  for (int j = 0; j < 4; ++j) {
    __m512 a = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88);
    __m512 b = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88);
    __m512 c = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xDD);
    __m512 d = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xDD);
    _mm512_storeu_ps(out + j * stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(out + (j + 8) * stride, _mm512_shuffle_f32x4(a, b, 0xDD));
    _mm512_storeu_ps(out + (j + 4) * stride, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(out + (j + 12) * stride, _mm512_shuffle_f32x4(c, d, 0xDD));
  }
#elif defined(PM_ISA_AVX2)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = (__m256)(load_int(rows[i] + offset) ^ flip);
  for (int i = 0; i < 8; i += 4) {
    __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
  }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(out + j * stride, _mm256_permute2f128_ps(t[j], t[4 + j], 0x20));
    _mm256_storeu_ps(out + (j + 4) * stride, _mm256_permute2f128_ps(t[j], t[4 + j], 0x31));
  }
#elif defined(PM_ISA_NEON)
  float64x2_t r[4];  // of rows 0 and 1: columns 0 and 2, then 1 and 3; the same of rows 2 and 3
  for (int i = 0; i < 4; i += 2) {
    const float32x4_t a = (float32x4_t)(load_int(rows[i] + offset) ^ flip);
    const float32x4_t b = (float32x4_t)(load_int(rows[i + 1] + offset) ^ flip);
    r[i] = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    r[i + 1] = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  }
  for (int j = 0; j < 2; ++j) {
    vst1q_f32(out + j * stride, vreinterpretq_f32_f64(vtrn1q_f64(r[j], r[j + 2])));
    vst1q_f32(out + (j + 2) * stride, vreinterpretq_f32_f64(vtrn2q_f64(r[j], r[j + 2])));
  }
#else
  for (int i = 0; i < W; ++i) {
    const F row = (F)(load_int(rows[i] + offset) ^ flip);
    for (int j = 0; j < W; ++j) out[j * stride + i] = row[j];
  }
#endif
}

// The floating point mode is part of the result: another library may have changed it in the
// calling thread (flush to zero). Set here, put back at the end of the scope.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9FC0); }  // nearest, FTZ, DAZ, no traps
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    set(uint64_t(1) << 24);  // nearest, flush to zero (numbers read and results), no traps
  }
  ~FloatMode() { set(saved_); }

 private:
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  uint64_t saved_;
#else
  FloatMode() {}
#endif
};

}  // namespace pm
