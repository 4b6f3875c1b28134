// Rows of activations in the order in which the tiles of linear read them; for integer weights
// rounded to integers per group of 32 inputs.
#include "kernels.h"

namespace pm {
namespace {

void pack_floats(const float* x, int64_t k0, int64_t k1, int64_t index, int64_t rows, float* out) {
  for (int64_t k = k0; k < k1; ++k) out[k * rows + index] = x[k - k0];
}

// One group of integers as the tiles read them; returns where the row scales start.
unsigned char* place_digits(int64_t kind, const int32_t* q, int64_t index, int64_t rows,
                            unsigned char* out) {
  if (input_bytes(kind) == 2 && HAS_WIDE_INPUTS) {
    for (int64_t j = 0; j < GROUP / 2; ++j, out += 4 * rows) {
      const int32_t* four = q + j / 2 * 4 + j % 2;
      const uint32_t pair = ((uint32_t)four[0] & 0xFFFF) | (uint32_t)four[2] << 16;
      std::memcpy(out + index * 4, &pair, 4);
    }
    return out;
  }
  int8_t high[GROUP], low[GROUP];
  const bool has_two = input_bytes(kind) == 2;
  PM_UNROLL for (int i = 0; i < GROUP; i += W) {
    const I integer = load_int(q + i);
    const I upper = has_two ? (integer + splat_int(64)) >> 7 : integer;
    store_bytes(high + i, upper);
    store_bytes(low + i, integer - (upper << 7));
  }
  for (int64_t j = 0; j < GROUP / 4; ++j, out += 4 * rows)
    std::memcpy(out + index * 4, high + 4 * j, 4);
  for (int64_t j = 0; has_two && j < GROUP / 4; ++j, out += 4 * rows)
    std::memcpy(out + index * 4, low + 4 * j, 4);
  return out;
}

// One group: q = round(x * limit / largest), scale = largest / limit; with two digits q is
// 128 * high + low, high in -127 .. 127, low in -64 .. 63. A group that holds NaN or infinity gets
// the scale NaN, so that its row shows it.
void pack_group(int64_t kind, const float* x, int64_t index, int64_t rows, unsigned char* out) {
  const I magnitude_bits = splat_int(0x7FFFFFFF);
  I largest_bits{};  // as integers NaN > infinity > every number
  PM_UNROLL for (int i = 0; i < GROUP; i += W) {
    const I bits = (I)load(x + i) & magnitude_bits;
    const I more = bits > largest_bits;
    largest_bits = (bits & more) | (largest_bits & ~more);
  }
  const int32_t top = max_integers(largest_bits);
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool is_finite = top < 0x7F800000;
  const float limit = has_fine_inputs(kind) ? 127.0f * 128.0f : 127.0f;
  // Below this limit / largest would overflow; such a group counts as zero.
  const F inverse = splat(is_finite && largest > 1e-34f ? limit / largest : 0.0f);
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: the integer lies in the low bits
  int32_t q[GROUP];
  I sums{};
  PM_UNROLL for (int i = 0; i < GROUP; i += W) {
    const F value = is_finite ? load(x + i) : F{};
    const I integer = (I)(value * inverse + magic) - splat_int(0x4B400000);
    sums += integer;
    std::memcpy(q + i, &integer, sizeof integer);
  }
  const int32_t sum = sum_integers(sums);
  const float scale = is_finite ? largest / limit : __builtin_nanf("");
  out = place_digits(kind, q, index, rows, out);
  std::memcpy(out + index * 4, &scale, 4);
  const float scaled = scale * (float)sum;
  if (is_uint4(kind))
    std::memcpy(out + (rows + index) * 4, &scaled, 4);
  else
    std::memcpy(out + (rows + index) * 4, &sum, 4);
}

}  // namespace

void pack_columns(int64_t kind, const float* x, int64_t k0, int64_t k1, int64_t index,
                  int64_t rows, unsigned char* block) {
  if (!is_integer(kind)) {
    pack_floats(x, k0, k1, index, rows, (float*)block);
    return;
  }
  for (int64_t k = k0; k < k1; k += GROUP)
    pack_group(kind, x + (k - k0), index, rows, block + packed_bytes(kind, rows, k));
}

}  // namespace pm
