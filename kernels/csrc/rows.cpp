// Operations on single rows: RMSNorm, SiLU * up, RoPE, exp. Tails use masked lanes of the same
// vector code, so an element's bits do not depend on where it lies.
#include <cmath>

#include "kernels.h"

namespace pm {

void rms_norm_row(const float* x, const float* weight, int64_t k, float eps, float* y) {
  F squares = F{};
  int64_t i = 0;
  for (; i + W <= k; i += W) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < k) {
    const F v = load_first(x + i, k - i);
    squares = fma(v, v, squares);
  }
  const F scale = splat(1.0f / std::sqrt(sum_lanes(squares) / (float)k + eps));
  for (i = 0; i + W <= k; i += W) store(y + i, load(x + i) * scale * load(weight + i));
  if (i < k)
    store_first(y + i, load_first(x + i, k - i) * scale * load_first(weight + i, k - i), k - i);
}

namespace {
PM_INLINE F silu_mul(F gate, F up) { return gate / (splat(1.0f) + exp(-gate)) * up; }
}  // namespace

void silu_mul_row(const float* gate, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(out + i, silu_mul(load(gate + i), load(up + i)));
  const int64_t rest = count - i;
  if (rest)
    store_first(out + i, silu_mul(load_first(gate + i, rest), load_first(up + i, rest)), rest);
}

void exp_row(const float* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(y + i, exp(load(x + i)));
  if (i < count) store_first(y + i, exp(load_first(x + i, count - i)), count - i);
}

void add_row(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = y[i] + x[i];
}

void rope_head(float* x, int64_t d, const float* cos_row, const float* sin_row) {
  const int64_t half = d / 2;
  float* low = x;
  float* high = x + half;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i < W ? half - i : W;
    const F c = load_first(cos_row + i, n), s = load_first(sin_row + i, n);
    const F a = load_first(low + i, n), b = load_first(high + i, n);
    store_first(low + i, a * c - b * s, n);
    store_first(high + i, b * c + a * s, n);
  }
}

}  // namespace pm
