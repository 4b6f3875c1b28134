// Rows as they are stored in checkpoints: float32 numbers, or integers with scales per group of 32.
// Block encodings are ggml's (ggml-quants.h of llama.cpp); the numbers have the bits that its gguf
// package gives.
#include <cmath>

#include "kernels.h"

namespace pm {
namespace {

constexpr int64_t SUPER = 256;  // numbers in a block of the k encodings
constexpr int64_t Q8_0_BYTES = 34, Q4_0_BYTES = 18, Q4_1_BYTES = 20;
constexpr int64_t Q4_K_BYTES = 144, Q5_K_BYTES = 176, Q6_K_BYTES = 210;

uint16_t read16(const unsigned char* p) { return (uint16_t)(p[0] | p[1] << 8); }
float read_half(const unsigned char* p) { return half_to_float(read16(p)); }

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// 32 nibbles: the low ones are the first half of a group, the high ones the second.
void read_nibbles(const unsigned char* data, int8_t* q) {
  for (int64_t i = 0; i < GROUP / 2; ++i) {
    q[i] = data[i] & 15;
    q[GROUP / 2 + i] = data[i] >> 4;
  }
}

// The scale and minimum, 6 bits each, of group j of a q4_k or q5_k block; s: their 12 bytes.
struct Pair {
  int scale, minimum;
};
Pair scale_and_minimum(const unsigned char* s, int64_t j) {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | (s[j - 4] >> 6 << 4), s[j + 4] >> 4 | (s[j] >> 6 << 4)};
}

// Group j of a q4_k or q5_k block: nibbles lie by pairs of groups, 32 bytes each.
int nibble(const unsigned char* nibbles, int64_t j, int64_t i) {
  const unsigned char pair = nibbles[j / 2 * GROUP + i];
  return j % 2 ? pair >> 4 : pair & 15;
}

// d, dmin, scales and minima, 128 bytes of nibbles. q5_k has 32 bytes of fifth bits before these.
void numbers_q4_k_q5_k(const unsigned char* data, bool has_fifth_bit, float* out) {
  const float d = read_half(data), dmin = read_half(data + 2);
  const unsigned char* fifth = data + 16;
  const unsigned char* nibbles = data + (has_fifth_bit ? 16 + GROUP : 16);
  for (int64_t j = 0; j < SUPER / GROUP; ++j) {
    const Pair pair = scale_and_minimum(data + 4, j);
    const float scale = d * (float)pair.scale, minimum = dmin * (float)pair.minimum;
    for (int64_t i = 0; i < GROUP; ++i) {
      int q = nibble(nibbles, j, i);
      if (has_fifth_bit) q |= (fifth[i] >> j & 1) << 4;
      *out++ = scale * (float)q - minimum;
    }
  }
}

// 128 bytes of low nibbles, 64 of high pairs of bits, a signed scale per 16 numbers, d.
void numbers_q6_k(const unsigned char* data, float* out) {
  const unsigned char *low = data, *high = data + 128;
  const int8_t* scales = (const int8_t*)(data + 192);
  const float d = read_half(data + 208);
  for (int64_t i = 0; i < SUPER; ++i) {
    const int64_t half = i / 128, part = i % 128 / 32, l = i % 32;
    const unsigned char nibbles = low[half * 64 + part % 2 * 32 + l];
    const int bits = (part < 2 ? nibbles & 15 : nibbles >> 4) |
                     (high[half * 32 + l] >> (2 * part) & 3) << 4;
    out[i] = d * (float)scales[i / 16] * (float)(bits - 32);
  }
}

void numbers_of_group(int64_t encoding, const unsigned char* data, float* out) {
  int8_t q[GROUP];
  const float scale = read_half(data);
  float minimum = 0.0f;
  if (encoding == PM_ENCODING_Q8_0) {
    std::memcpy(q, data + 2, GROUP);
  } else {
    const bool has_minimum = encoding == PM_ENCODING_Q4_1;
    minimum = has_minimum ? read_half(data + 2) : -8.0f * scale;
    read_nibbles(data + (has_minimum ? 4 : 2), q);
  }
  for (int64_t i = 0; i < GROUP; ++i) out[i] = scale * (float)q[i] + minimum;
}

void numbers_of_floats(int64_t encoding, const unsigned char* data, int64_t k, float* out) {
  if (encoding == PM_ENCODING_F32) {
    std::memcpy(out, data, (size_t)k * 4);
    return;
  }
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t wide = (uint32_t)read16(data + 2 * i) << 16;
    if (encoding == PM_ENCODING_F16)
      out[i] = read_half(data + 2 * i);
    else
      std::memcpy(out + i, &wide, 4);
  }
}

int64_t block_numbers(int64_t encoding) {
  return encoding < PM_ENCODING_Q8_0 ? 1 : encoding < PM_ENCODING_Q4_K ? GROUP : SUPER;
}

int64_t block_bytes(int64_t encoding) {
  switch (encoding) {
    case PM_ENCODING_F32: return 4;
    case PM_ENCODING_F16:
    case PM_ENCODING_BF16: return 2;
    case PM_ENCODING_Q8_0: return Q8_0_BYTES;
    case PM_ENCODING_Q4_0: return Q4_0_BYTES;
    case PM_ENCODING_Q4_1: return Q4_1_BYTES;
    case PM_ENCODING_Q4_K: return Q4_K_BYTES;
    case PM_ENCODING_Q5_K: return Q5_K_BYTES;
    case PM_ENCODING_Q6_K: return Q6_K_BYTES;
  }
  return 0;
}

}  // namespace

// Finite numbers, to nearest even; overflow becomes the largest number.
uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (magnitude >= 0x477FF000) return sign | 0x7BFF;
  if (magnitude < 0x38800000)  // subnormal: a multiple of 2^-24
    return sign | (uint16_t)std::nearbyint(std::fabs(x) * 16777216.0f);
  return sign | (uint16_t)((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

int64_t encoded_row_bytes(int64_t encoding, int64_t k) {
  if (k % block_numbers(encoding)) return 0;
  return k / block_numbers(encoding) * block_bytes(encoding);
}

void decode_numbers(int64_t encoding, const unsigned char* data, int64_t k, float* out) {
  if (encoding < PM_ENCODING_Q8_0) return numbers_of_floats(encoding, data, k, out);
  const int64_t numbers = block_numbers(encoding), bytes = block_bytes(encoding);
  for (int64_t at = 0; at < k; at += numbers, data += bytes, out += numbers) {
    if (encoding == PM_ENCODING_Q6_K)
      numbers_q6_k(data, out);
    else if (encoding >= PM_ENCODING_Q4_K)
      numbers_q4_k_q5_k(data, encoding == PM_ENCODING_Q5_K, out);
    else
      numbers_of_group(encoding, data, out);
  }
}

void decode_integers(int64_t encoding, const unsigned char* data, int64_t k, IntegerRow row) {
  const int64_t bytes = block_bytes(encoding), per_block = block_numbers(encoding) / GROUP;
  for (int64_t g = 0; g < k / GROUP; ++g) {
    const unsigned char* block = data + g / per_block * bytes;
    int8_t* q = row.q + g * GROUP;
    row.scale[g] = read16(block);
    if (encoding == PM_ENCODING_Q8_0) {
      std::memcpy(q, block + 2, GROUP);
    } else if (encoding == PM_ENCODING_Q4_0) {
      row.minimum[g] = float_to_half(-8.0f * read_half(block));
      read_nibbles(block + 2, q);
    } else if (encoding == PM_ENCODING_Q4_1) {
      row.minimum[g] = read16(block + 2);
      read_nibbles(block + 4, q);
    } else {  // q4_k: the scales are rounded to half
      const int64_t j = g % per_block;
      const Pair pair = scale_and_minimum(block + 4, j);
      row.scale[g] = float_to_half(read_half(block) * (float)pair.scale);
      row.minimum[g] = float_to_half(-(read_half(block + 2) * (float)pair.minimum));
      for (int64_t i = 0; i < GROUP; ++i) q[i] = (int8_t)nibble(block + 16, j, i);
    }
  }
}

}  // namespace pm
