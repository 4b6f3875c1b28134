// Rows of K and V rounded to the kind of the pool, as they are written.
#include <cmath>
#include <cstring>

#include "attention.h"

namespace pm {
namespace {

// What is not finite becomes NaN, so that its row shows it.
PM_INLINE void put16(unsigned char* row, int64_t j, float x, uint16_t narrow, uint16_t nan) {
  const uint16_t bits = std::isfinite(x) ? narrow : nan;
  std::memcpy(row + 2 * j, &bits, 2);
}

// put(i, bytes) for x[i] .. x[i + W] as integers; returns their scale. Bytes past d are zero.
template <typename Put>
PM_INLINE float quantise(const float* x, int64_t d, Put put) {
  const I magnitude_bits = splat_int(0x7FFFFFFF);
  I largest_bits{};  // as integers NaN > infinity > every number
  for (int64_t i = 0; i < d; i += W) {
    const I bits = (I)(i + W <= d ? load(x + i) : load_first(x + i, d - i)) & magnitude_bits;
    const I more = bits > largest_bits;
    largest_bits = (bits & more) | (largest_bits & ~more);
  }
  int32_t lanes[W], top = 0;
  std::memcpy(lanes, &largest_bits, sizeof lanes);
  for (int i = 0; i < W; ++i) top = top > lanes[i] ? top : lanes[i];
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool is_finite = top < 0x7F800000;
  // Below this 127 / largest would overflow; such a row counts as zero.
  const F inverse = splat(is_finite && largest > 1e-34f ? 127.0f / largest : 0.0f);
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: the integer lies in the low bits
  for (int64_t i = 0; i < d; i += W) {
    const F value = i + W <= d ? load(x + i) : load_first(x + i, d - i);
    const I integer = (I)((is_finite ? value : F{}) * inverse + magic) - splat_int(0x4B400000);
    int8_t bytes[W];
    store_bytes(bytes, integer);
    put(i, bytes);
  }
  return is_finite ? largest / 127.0f : __builtin_nanf("");
}

// One head of one token into its packed page. Every write is to this token's own bytes.
float write_packed_k(const KvLayout& kv, unsigned char* head, int64_t token, const float* x) {
  return quantise(x, kv.head_dim, [&](int64_t i, const int8_t* bytes) {
    PM_UNROLL for (int j = 0; j < W; j += 4)
      std::memcpy(head + (i + j) * kv.page_size + token * 4, bytes + j, 4);
  });
}
float write_packed_v(const KvLayout& kv, unsigned char* head, int64_t token, const float* x) {
  unsigned char* at = head + token / 4 * 4 * kv.head_dim + token % 4;
  return quantise(x, kv.head_dim, [&](int64_t i, const int8_t* bytes) {
    PM_UNROLL for (int j = 0; j < W; ++j) at[(i + j) * 4] = (unsigned char)bytes[j];
  });
}

void write_packed(const KvLayout& kv, unsigned char* side, int64_t slot, const float* x,
                  float (*write)(const KvLayout&, unsigned char*, int64_t, const float*)) {
  const int64_t token = slot % kv.page_size;
  unsigned char* page = side + slot / kv.page_size * kv.page_bytes();
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    const float scale =
        write(kv, page + kv.row_offset(head, 0), token, x + head * kv.head_dim);
    std::memcpy(page + kv.scale_offset(head, token), &scale, sizeof scale);
  }
}

void write_rows(const KvLayout& kv, unsigned char* side, int64_t slot, const float* x) {
  const int64_t d = kv.head_dim, token = slot % kv.page_size;
  unsigned char* page = side + slot / kv.page_size * kv.page_bytes();
  for (int64_t head = 0; head < kv.num_kv_heads; ++head, x += d) {
    unsigned char* row = page + kv.row_offset(head, token);
    switch (kv.kind) {
      case PM_KV_F32:
        std::memcpy(row, x, (size_t)d * sizeof(float));
        break;
      case PM_KV_INT8: {
        const float scale = quantise_row(x, d, (int8_t*)row);
        std::memcpy(page + kv.scale_offset(head, token), &scale, sizeof scale);
        break;
      }
      case PM_KV_BF16:
        for (int64_t j = 0; j < d; ++j) put16(row, j, x[j], float_to_bf16(x[j]), 0x7FC0);
        break;
      default:
        for (int64_t j = 0; j < d; ++j) put16(row, j, x[j], float_to_half(x[j]), 0x7E00);
    }
  }
}

}  // namespace

float quantise_row(const float* x, int64_t d, int8_t* out) {
  return quantise(x, d, [&](int64_t i, const int8_t* bytes) {
    std::memcpy(out + i, bytes, (size_t)std::min<int64_t>(W, d - i));
  });
}

void kv_write(const KvLayout& kv, unsigned char* k_pages, unsigned char* v_pages, int64_t slot,
              const float* k, const float* v) {
  if (kv.is_packed()) {
    write_packed(kv, k_pages, slot, k, write_packed_k);
    write_packed(kv, v_pages, slot, v, write_packed_v);
  } else {
    write_rows(kv, k_pages, slot, k);
    write_rows(kv, v_pages, slot, v);
  }
}

}  // namespace pm
