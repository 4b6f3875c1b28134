// What the machine can do at most, measured with the instructions that the kernels use: reads of
// memory, fused multiply-adds, int8 dot products, those with a scale per group. `palmette bench kernels` puts the kernels beside
// these.
#include "kernels.h"
#include "team.h"

namespace pm {
namespace {

// Enough to hide the latency of one on two (four) units, few enough for the registers.
constexpr int CHAINS = PM_HAS_32_REGISTERS ? 24 : 12;

struct Job {
  int num_threads;
  int64_t count;
  const unsigned char* data;
  std::atomic<int64_t> sink;
};

void read_part(void* context, int member) {
  Job& job = *(Job*)context;
  if (member >= job.num_threads) return;
  const int64_t part = job.count / job.num_threads / 256 * 256;
  const unsigned char* at = job.data + member * part;
  I sums[4] = {};
  for (int64_t i = 0; i < part; i += 4 * (int64_t)sizeof(I)) {
    for (int64_t j = 0; j < 4; ++j) {
      I lanes;
      std::memcpy(&lanes, at + i + j * (int64_t)sizeof(I), sizeof lanes);
      sums[j] += lanes;
    }
    prefetch(at + i + PREFETCH_BYTES);
  }
  const I sum = sums[0] + sums[1] + sums[2] + sums[3];
  job.sink += sum[0];
}

void multiply_floats(void* context, int member) {
  Job& job = *(Job*)context;
  if (member >= job.num_threads) return;
  const FloatMode mode;
  float factors[2 * W + CHAINS] = {};
  asm volatile("" : : "r"(factors) : "memory");  // the compiler must not see equal chains
  F sums[CHAINS];
  PM_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = load(factors + W + i);
  for (int64_t n = 0; n < job.count; ++n) {
    asm volatile("" : : "r"(factors) : "memory");  // nor constants
    const F a = load(factors), b = load(factors + W);
    PM_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = fma(a, b, sums[i]);
  }
  F total{};
  PM_UNROLL for (int i = 0; i < CHAINS; ++i) total += sums[i];
  job.sink += (int64_t)sum_lanes(total);
}

PM_INLINE I best_dot(I sum, I w, I x) {
  // AVX2 alone: products are added in 16 bits, and widened once per group.
#if defined(PM_ISA_AVX2) && !defined(__AVXVNNI__)
  return (I)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#else
  return dot4_unsigned(sum, w, x);
#endif
}

void multiply_bytes(void* context, int member) {
  Job& job = *(Job*)context;
  if (member >= job.num_threads) return;
  // Where a product is an instruction of its own, every chain has its own, so that none is shared.
  constexpr int WEIGHTS = PM_HAS_32_REGISTERS ? 1 : 3;
  constexpr int INPUTS = PM_HAS_32_REGISTERS ? 1 : CHAINS / WEIGHTS;
  alignas(64) int32_t factors[(WEIGHTS + INPUTS) * W + CHAINS] = {};
  asm volatile("" : : "r"(factors) : "memory");
  I sums[CHAINS];
  PM_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = load_int(factors + i);
  for (int64_t n = 0; n < job.count; ++n) {
    asm volatile("" : : "r"(factors) : "memory");
    PM_UNROLL for (int i = 0; i < CHAINS; ++i)
      sums[i] = best_dot(sums[i], load_int(factors + i % WEIGHTS * W),
                         load_int(factors + (WEIGHTS + i / WEIGHTS % INPUTS) * W));
  }
  I total{};
  PM_UNROLL for (int i = 0; i < CHAINS; ++i) total += sums[i];
  job.sink += total[0];
}

// The same as a linear needs them: after each group of inputs its sum becomes a float, is scaled
// and added.
void multiply_groups(void* context, int member) {
  Job& job = *(Job*)context;
  if (member >= job.num_threads) return;
  const FloatMode mode;
  alignas(64) int32_t factors[W + GROUP / 4 + CHAINS / 2] = {};
  alignas(64) float scales[CHAINS / 2 + W] = {};
  asm volatile("" : : "r"(factors), "r"(scales) : "memory");
  F totals[CHAINS / 2] = {};
  for (int64_t n = 0; n < job.count; ++n) {
    asm volatile("" : : "r"(factors), "r"(scales) : "memory");
    I sums[CHAINS / 2] = {};
    PM_UNROLL for (int step = 0; step < GROUP / 4; ++step)
      PM_UNROLL for (int i = 0; i < CHAINS / 2; ++i)
        sums[i] = best_dot(sums[i], load_int(factors), splat_int(factors[W + step + i]));
    const F scale = load(scales);
    PM_UNROLL for (int i = 0; i < CHAINS / 2; ++i)
      totals[i] = fma(to_float(sums[i]), scale * splat(scales[i]), totals[i]);
  }
  F total{};
  PM_UNROLL for (int i = 0; i < CHAINS / 2; ++i) total += totals[i];
  job.sink += (int64_t)sum_lanes(total);
}

}  // namespace
}  // namespace pm

int pm_limit(PmPool* pool, int64_t what, int64_t num_threads, int64_t count, const void* data,
             int64_t* work) {
  if (pool->team.is_forked()) return PM_FORKED;
  if (num_threads < 1 || num_threads > pool->team.size() || count < 0) return PM_INVALID;
  pm::Job job{(int)num_threads, count, (const unsigned char*)data, {0}};
  switch (what) {
    case PM_LIMIT_READ:
      pool->team.run(pm::read_part, &job);
      *work = count / num_threads / 256 * 256 * num_threads;
      return PM_OK;
    case PM_LIMIT_FLOAT:
      pool->team.run(pm::multiply_floats, &job);
      *work = count * num_threads * pm::CHAINS * pm::W;
      return PM_OK;
    case PM_LIMIT_INT8:
      pool->team.run(pm::multiply_bytes, &job);
      *work = count * num_threads * pm::CHAINS * pm::W * 4;
      return PM_OK;
    case PM_LIMIT_GROUPS:
      pool->team.run(pm::multiply_groups, &job);
      *work = count * num_threads * pm::CHAINS / 2 * pm::W * pm::GROUP;
      return PM_OK;
  }
  return PM_INVALID;
}
