// Choosing tokens from logits: the rule of kernels/sampling.py in a few passes over a row. A row is
// one member's work from start to end, with one order of operations: no result depends on the other
// rows or the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace pm {
namespace {

constexpr int64_t CUT = MAXIMA_BLOCK;  // values per block: the sum of its weights is kept too
static_assert(CUT == 64, "two words of a mask");
constexpr int64_t FIRST_TOP = 64;  // first guess at how many ids top_p keeps
constexpr int64_t NUM_BINS = 1024;
constexpr int64_t SPARSE_PART = 8;  // below 1 / 8 of its words a mask is worked on as a list
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr int32_t NOT_FINITE = -1;

struct Candidate {
  float value, weight;
  int32_t place;
};
// Best first, ties to the lower place.
bool is_better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.place < b.place);
}
bool is_before(const Candidate& a, const Candidate& b) { return a.place < b.place; }

int64_t num_blocks(int64_t n) { return num_maxima(n); }

// The scratch of one member.
struct Space {
  float *values, *weights, *block_max, *block_sum, *spare;
  int32_t *ids, *bins;
  Candidate *candidates, *in_bin;

  Space(float* at, int64_t v) {
    const int64_t n = (v + 15) / 16 * 16, blocks = (num_blocks(v) + 15) / 16 * 16;
    values = at;
    weights = values + n;
    ids = (int32_t*)(weights + n);
    bins = ids + n;
    candidates = (Candidate*)(bins + n);
    in_bin = candidates + n;
    block_max = (float*)(in_bin + n);
    block_sum = block_max + blocks;
    spare = block_sum + blocks;
  }
  static int64_t floats(int64_t v) { return 10 * ((v + 15) / 16 * 16) + 3 * (num_blocks(v) + 16); }
};

bool is_set(const int32_t* mask, int64_t id) { return (uint32_t)mask[id >> 5] >> (id & 31) & 1; }

// The values that may be chosen, and what one pass finds.
struct Row {
  const float* values;
  int64_t n;
  const int32_t* ids = nullptr;   // null: a place is an id
  const int32_t* mask = nullptr;  // bits of the places that count; null: all
  float largest = LOWEST;
  bool has_nan = false;

  int32_t id(int64_t place) const { return ids ? ids[place] : (int32_t)place; }
  bool counts(int64_t place) const { return !mask || is_set(mask, place); }
  // Whether the mask leaves all, or nothing, of whole block b.
  bool is_all(int64_t b) const { return !mask || (mask[2 * b] & mask[2 * b + 1]) == -1; }
  bool is_out(int64_t b) const { return mask && (mask[2 * b] | mask[2 * b + 1]) == 0; }
  // Vectors of lanes from place i on, which is a multiple of W.
  F masked(int64_t i, F x) const {
    return mask ? select_bits((uint32_t)mask[i >> 5] >> (i & 31), x, splat(LOWEST)) : x;
  }
};

// The largest value and whether any is NaN, from the block maxima.
void look_at_maxima(Row* row, const float* block_max) {
  row->largest = LOWEST;
  row->has_nan = false;
  for (int64_t b = 0; b < num_blocks(row->n); ++b) {
    row->has_nan |= block_max[b] != block_max[b];
    row->largest = block_max[b] > row->largest ? block_max[b] : row->largest;
  }
}

// The maximum of what the mask leaves of block b, of which nothing is NaN; that of all is known.
void look_at_block(const Row& row, int64_t b, float* block_max) {
  const int64_t start = b * CUT, end = std::min(row.n, start + CUT);
  const bool is_whole = end - start == CUT;
  if (is_whole && row.is_all(b)) return;
  float most = LOWEST;
  if (is_whole) {
    F lanes = splat(LOWEST);
    PM_UNROLL for (int64_t i = start; i < start + CUT; i += W) {
      const F x = row.masked(i, load(row.values + i));
      lanes = select(x > lanes, x, lanes);
    }
    most = max_lanes(lanes);
  } else {
    for (int64_t i = start; i < end; ++i)
      if (row.counts(i)) most = std::max(most, row.values[i]);
  }
  block_max[b] = most;
}

void look(Row* row, float* block_max) {
  for (int64_t b = 0; b * CUT < row->n; ++b)
    block_max[b] = block_maximum(row->values + b * CUT, row->n - b * CUT);
  look_at_maxima(row, block_max);
}

int64_t first_largest(const Row& row, const float* block_max) {
  int64_t b = 0;
  while (block_max[b] != row.largest) ++b;
  int64_t i = b * CUT;
  while (row.values[i] != row.largest || !row.counts(i)) ++i;
  return i;
}

PM_INLINE F weight_of(F x) { return select(x < splat(-87.0f), F{}, exp(x)); }

float weight_of(float value, float largest, float temperature) {
  float x[W];
  store(x, weight_of(splat((value - largest) / temperature)));
  return x[0];
}

// weights = exp((values - largest) / temperature), their sums per block; the sum of all.
double weigh(const Row& row, float temperature, float* weights, float* block_sum) {
  const F largest = splat(row.largest), divisor = splat(temperature);
  double total = 0.0;
  for (int64_t b = 0; b * CUT < row.n; ++b) {
    F sum{};
    const int64_t start = b * CUT, end = std::min(row.n, start + CUT);
    const bool is_whole = end - start == CUT;
    if (is_whole && row.is_out(b)) {
      std::fill_n(weights + start, CUT, 0.0f);
    } else if (is_whole && row.is_all(b)) {
      PM_UNROLL for (int64_t i = start; i < start + CUT; i += W) {
        const F w = weight_of((load(row.values + i) - largest) / divisor);
        store(weights + i, w);
        sum += w;
      }
    } else if (is_whole) {
      PM_UNROLL for (int64_t i = start; i < start + CUT; i += W) {
        const F w = weight_of((row.masked(i, load(row.values + i)) - largest) / divisor);
        store(weights + i, w);
        sum += w;
      }
    } else {
      for (int64_t i = start; i < end; i += W) {
        const int64_t rest = end - i < W ? end - i : W;
        const F x = row.masked(i, load_first(row.values + i, rest));
        store_first(weights + i, weight_of((x - largest) / divisor), rest);
        sum += load_first(weights + i, rest);
      }
    }
    block_sum[b] = sum_lanes(sum);
    total += block_sum[b];
  }
  return total;
}

// The min(k, n) best values, best first, without weights. The k-th largest block maximum bounds
// the k-th largest value from below, so few are left to sort.
int64_t best(const Row& row, const Space& space, int64_t k) {
  const int64_t blocks = num_blocks(row.n);
  float bound = LOWEST;
  if (k < blocks) {
    std::copy(space.block_max, space.block_max + blocks, space.spare);
    std::nth_element(space.spare, space.spare + k - 1, space.spare + blocks,
                     [](float a, float b) { return a > b; });
    bound = space.spare[k - 1];
  }
  int64_t count = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (space.block_max[b] < bound) continue;
    for (int64_t i = b * CUT; i < std::min(row.n, (b + 1) * CUT); ++i)
      if (row.values[i] >= bound && row.counts(i))
        space.candidates[count++] = {row.values[i], 0.0f, (int32_t)i};
  }
  if (count > k) {
    std::nth_element(space.candidates, space.candidates + k, space.candidates + count, is_better);
    count = k;
  }
  std::sort(space.candidates, space.candidates + count, is_better);
  return count;
}

// How many of the candidates, best first, reach `wanted`; count + 1: all of them do not.
int64_t reach(const Candidate* candidates, int64_t count, double wanted) {
  double running = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    running += candidates[i].weight;
    if (running >= wanted) return i + 1;
  }
  return count + 1;
}

// The fewest best values whose weights reach `wanted`, places ascending, from a row whose weights
// are known. Values below `least` cannot be among them; the others are counted in bins of falling
// value, and only the bin in which the sum is reached is sorted.
int64_t nucleus(const Row& row, const Space& space, float temperature, double wanted, float least) {
  Candidate* const candidates = space.candidates;
  int64_t count = 0;
  float smallest = row.largest;
  for (int64_t b = 0; b * CUT < row.n; ++b) {
    if (space.block_sum[b] < least) continue;
    for (int64_t i = b * CUT; i < std::min(row.n, (b + 1) * CUT); ++i) {
      candidates[count] = {row.values[i], space.weights[i], (int32_t)i};
      const bool is_in = space.weights[i] >= least && space.weights[i] > 0.0f;
      smallest = is_in && row.values[i] < smallest ? row.values[i] : smallest;
      count += is_in;
    }
  }
  double sums[NUM_BINS] = {};
  const float width = std::max((row.largest - smallest) / temperature, 1e-6f) / (float)NUM_BINS;
  for (int64_t i = 0; i < count; ++i) {
    const float bin = (row.largest - candidates[i].value) / temperature / width;
    space.bins[i] = bin < (float)NUM_BINS ? (int32_t)bin : NUM_BINS - 1;
    sums[space.bins[i]] += candidates[i].weight;
  }
  int32_t cut = 0;
  double before = 0.0;
  while (cut < NUM_BINS - 1 && before + sums[cut] < wanted) before += sums[cut++];
  int64_t within = 0;
  for (int64_t i = 0; i < count; ++i)
    if (space.bins[i] == cut) space.in_bin[within++] = candidates[i];
  std::sort(space.in_bin, space.in_bin + within, is_better);
  const int64_t needed = std::min(reach(space.in_bin, within, wanted - before), within);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (space.bins[i] < cut ||
        (space.bins[i] == cut && needed && !is_better(space.in_bin[needed - 1], candidates[i])))
      candidates[kept++] = candidates[i];
  return kept;
}

// The first place at which the running sum exceeds `random` of the total, of a list.
int64_t draw_of_list(const Candidate* list, int64_t count, double random) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += list[i].weight;
  double running = 0.0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (list[i].weight > 0.0f) last = i;
    running += list[i].weight;
    if (running > random * total) return list[i].place;
  }
  return list[last].place;  // rounding carried the goal to the end
}

// The same of a whole row, blocks first.
int64_t draw_of_row(const Row& row, const Space& space, double total, double random) {
  double before = 0.0;
  int64_t block = 0;
  for (int64_t b = 0; b < num_blocks(row.n); ++b) {
    if (space.block_sum[b] <= 0.0f) continue;
    block = b;
    if (before + space.block_sum[b] > random * total) break;
    before += space.block_sum[b];
  }
  double running = 0.0;
  int64_t last = block * CUT;
  for (int64_t i = block * CUT; i < std::min(row.n, (block + 1) * CUT); ++i) {
    if (space.weights[i] <= 0.0f) continue;
    last = i;
    running += space.weights[i];
    if (running > std::max(random * total - before, 0.0)) break;
  }
  return last;
}

// A place by temperature and filters; the largest value is finite.
int64_t draw(const Row& row, const PmSampling& s, int64_t index, const Space& space) {
  const float temperature = s.temperature[index], min_p = s.min_p[index];
  const double top_p = s.top_p[index], random = s.random[index];
  const int64_t top_k = s.top_k[index];
  const bool has_top_k = top_k > 0 && top_k < row.n;
  double total = has_top_k ? 0.0 : weigh(row, temperature, space.weights, space.block_sum);
  if (!has_top_k && top_p >= 1.0 && min_p <= 0.0f) return draw_of_row(row, space, total, random);
  int64_t count = 0;
  if (has_top_k || top_p < 1.0) {
    count = best(row, space, has_top_k ? top_k : FIRST_TOP);
    for (int64_t i = 0; i < count; ++i) {
      Candidate& c = space.candidates[i];
      c.weight = weight_of(c.value, row.largest, temperature);
      if (has_top_k) total += c.weight;
    }
    const int64_t reached = top_p < 1.0 ? reach(space.candidates, count, top_p * total) : count;
    if (reached <= count || has_top_k || count == row.n) {
      count = std::min(count, reached);
      std::sort(space.candidates, space.candidates + count, is_before);
    } else {  // what is below the mean's share of 1 - top_p adds up to less than 1 - top_p
      const double least = (1.0 - top_p) * total / (double)row.n * 0.999;
      count = nucleus(row, space, temperature, top_p * total, (float)least);
    }
  } else {
    for (int64_t i = 0; i < row.n; ++i)
      if (space.weights[i] >= min_p)
        space.candidates[count++] = {row.values[i], space.weights[i], (int32_t)i};
  }
  int64_t likely = 0;  // the largest weight is exactly 1
  for (int64_t i = 0; i < count; ++i)
    if (space.candidates[i].weight >= min_p) space.candidates[likely++] = space.candidates[i];
  return draw_of_list(space.candidates, likely, random);
}

// The row with what the mask forbids left out: a list when few are allowed, else a row with a mask,
// whose block maxima are taken anew where something of a block is forbidden.
Row masked(const Row& row, const int32_t* mask, const Space& space) {
  const float* const values = row.values;
  const int64_t n = row.n, words = (n + 31) / 32;
  int64_t used = 0;
  for (int64_t i = 0; i < words; ++i) used += mask[i] != 0;
  if (used * SPARSE_PART > words) {
    Row rest{values, n, nullptr, mask};
    for (int64_t b = 0; b * CUT < n; ++b) look_at_block(rest, b, space.block_max);
    look_at_maxima(&rest, space.block_max);
    return rest;
  }
  int64_t count = 0;
  for (int64_t word = 0; word < words; ++word)
    for (uint32_t left = (uint32_t)mask[word]; left; left &= left - 1) {
      const int64_t id = word * 32 + __builtin_ctz(left);
      if (id >= n) break;
      space.ids[count] = (int32_t)id;
      space.values[count++] = values[id];
    }
  Row list{space.values, count, space.ids};
  look(&list, space.block_max);
  return list;
}

int32_t choose(const PmSampling& s, int64_t index, Row row, const Space& space) {
  const float* edited = s.edited[index];
  const int32_t* mask = s.masks[index];
  const bool is_greedy = s.temperature[index] == 0.0f;
  if (edited) {
    row = {edited, s.vocab_size};
    look(&row, space.block_max);
  }
  if (mask) {
    if (is_greedy && row.largest > LOWEST) {
      const int64_t id = first_largest(row, space.block_max);
      if (is_set(mask, id)) return (int32_t)id;
    }
    row = masked(row, mask, space);
  }
  if (row.n == 0 || row.largest == LOWEST) return NOT_FINITE;
  return row.id(is_greedy ? first_largest(row, space.block_max) : draw(row, s, index, space));
}

// The log-probability of the chosen id, and the best ids with theirs.
void score(const PmSampling& s, int64_t index, const Row& row, const Space& space) {
  const double normalizer =
      row.largest + std::log(weigh(row, 1.0f, space.weights, space.block_sum));
  s.logprobs[index] = (float)(row.values[s.token_ids[index]] - normalizer);
  if (s.num_top[index] <= 0) return;
  const int64_t count = best(row, space, std::min<int64_t>(s.num_top[index], row.n));
  for (int64_t i = 0; i < count; ++i) {
    s.top_ids[index * s.most_top + i] = space.candidates[i].place;
    s.top_logprobs[index * s.most_top + i] = (float)(space.candidates[i].value - normalizer);
  }
}

}  // namespace

float block_maximum(const float* values, int64_t count) {
  float most = LOWEST;
  bool has_nan = false;
  if (count >= CUT) {
    F lanes = splat(LOWEST);
    I nan{};
    PM_UNROLL for (int64_t i = 0; i < CUT; i += W) {
      const F x = load(values + i);
      nan |= x != x;
      lanes = select(x > lanes, x, lanes);
    }
    most = max_lanes(lanes);
    has_nan = sum_integers(nan) != 0;  // -1 per NaN of a lane
  } else {
    for (int64_t i = 0; i < count; ++i) {
      has_nan |= values[i] != values[i];
      most = values[i] > most ? values[i] : most;
    }
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : most;
}

int64_t sample_scratch_floats(int64_t vocab_size) { return Space::floats(vocab_size); }

void sample_row(const PmSampling& s, int64_t index, float* scratch) {
  const Space space(scratch, s.vocab_size);
  Row row{s.logits + index * s.vocab_size, s.vocab_size};
  if (s.maxima) {
    const float* maxima = s.maxima + index * num_blocks(s.vocab_size);
    std::copy_n(maxima, num_blocks(s.vocab_size), space.block_max);
    look_at_maxima(&row, space.block_max);
  } else {
    look(&row, space.block_max);
  }
  const int32_t target = s.targets[index];
  int32_t& chosen = s.token_ids[index];
  if (row.has_nan || !std::isfinite(row.largest)) {
    chosen = NOT_FINITE;
    return;
  }
  chosen = target >= 0 ? target : choose(s, index, row, space);
  if (chosen == NOT_FINITE || (s.num_top[index] < 0 && target < 0)) return;
  if (s.edited[index] || s.masks[index]) look(&row, space.block_max);  // choosing wrote over it
  score(s, index, row, space);
}

}  // namespace pm
