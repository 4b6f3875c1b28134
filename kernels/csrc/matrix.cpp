// Weight matrices: memory, and repacking of stored rows into panels.
//
// Block encodings are ggml's (ggml-quants.h of llama.cpp). A kind that can hold a block's integers
// keeps them; otherwise the row becomes float32 first and is rounded to the kind of the matrix.
#include <cmath>
#include <cstdlib>

#include "kernels.h"
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace pm {
namespace {

constexpr int64_t HUGE_PAGE = int64_t(2) << 20;
constexpr int64_t MARGIN = PREFETCH_BYTES + 64;

uint16_t read16(const unsigned char* p) { return (uint16_t)(p[0] | p[1] << 8); }

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

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

// One row as integers: w = scale * q + minimum per group.
struct IntegerRow {
  int8_t* q;        // [K]; uint4: 0 .. 15
  uint16_t* scale;  // [K / GROUP] half
  uint16_t* minimum;
};

void decode_q8_0(const unsigned char* data, int64_t groups, IntegerRow row) {
  for (int64_t g = 0; g < groups; ++g, data += 34) {
    row.scale[g] = read16(data);
    std::memcpy(row.q + g * GROUP, data + 2, GROUP);
  }
}

void decode_q4(const unsigned char* data, int64_t groups, bool has_minimum, IntegerRow row) {
  for (int64_t g = 0; g < groups; ++g) {
    row.scale[g] = read16(data);
    row.minimum[g] =
        has_minimum ? read16(data + 2) : float_to_half(-8.0f * half_to_float(row.scale[g]));
    data += has_minimum ? 4 : 2;
    for (int64_t i = 0; i < 16; ++i) {
      row.q[g * GROUP + i] = data[i] & 15;
      row.q[g * GROUP + 16 + i] = data[i] >> 4;
    }
    data += 16;
  }
}

// 256 numbers: d, dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles.
void decode_q4_k(const unsigned char* data, int64_t blocks, IntegerRow row) {
  for (int64_t b = 0; b < blocks; ++b, data += 144) {
    const float d = half_to_float(read16(data)), dmin = half_to_float(read16(data + 2));
    const unsigned char* s = data + 4;
    for (int64_t j = 0; j < 8; ++j) {
      const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
      const int minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6 << 4);
      const int64_t g = b * 8 + j;
      row.scale[g] = float_to_half(d * (float)scale);
      row.minimum[g] = float_to_half(-dmin * (float)minimum);
      const unsigned char* nibbles = data + 16 + j / 2 * 32;
      for (int64_t i = 0; i < GROUP; ++i)
        row.q[g * GROUP + i] = j % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
    }
  }
}

// To nearest multiples of scale = largest / 127, the scale rounded to half first.
void round_int8(const float* x, int64_t groups, IntegerRow row) {
  for (int64_t g = 0; g < groups; ++g, x += GROUP) {
    float largest = 0.0f;
    for (int64_t i = 0; i < GROUP; ++i) largest = std::fmax(largest, std::fabs(x[i]));
    row.scale[g] = float_to_half(largest / 127.0f);
    const float scale = half_to_float(row.scale[g]);
    for (int64_t i = 0; i < GROUP; ++i) {
      const float q = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
      row.q[g * GROUP + i] = (int8_t)std::fmin(std::fmax(q, -127.0f), 127.0f);
    }
  }
}

void decode_float(int64_t encoding, const unsigned char* data, int64_t k, float* out) {
  if (encoding == PM_ENCODING_F32) {
    std::memcpy(out, data, (size_t)k * 4);
    return;
  }
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t bits = read16(data + 2 * i);
    if (encoding == PM_ENCODING_F16) {
      out[i] = half_to_float(bits);
    } else {
      const uint32_t wide = (uint32_t)bits << 16;
      std::memcpy(out + i, &wide, 4);
    }
  }
}

// Exact but for one rounding, where a minimum is added.
void widen(IntegerRow row, int64_t groups, bool has_minimum, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = half_to_float(row.scale[g]);
    const float minimum = has_minimum ? half_to_float(row.minimum[g]) : 0.0f;
    for (int64_t i = 0; i < GROUP; ++i)
      out[g * GROUP + i] = scale * (float)row.q[g * GROUP + i] + minimum;
  }
}

void place_float(PmMatrix* matrix, int64_t n, const float* x) {
  unsigned char* panel = matrix->data + n / PW * matrix->panel_bytes;
  const int64_t lane = n % PW;
  for (int64_t k = 0; k < matrix->k; ++k) {
    const int64_t at = k * PW + lane;
    if (matrix->kind == PM_F32)
      ((float*)panel)[at] = x[k];
    else
      ((uint16_t*)panel)[at] = matrix->kind == PM_BF16 ? float_to_bf16(x[k]) : float_to_half(x[k]);
  }
}

void place_integers(PmMatrix* matrix, int64_t n, IntegerRow row) {
  const bool is_int8 = !is_uint4(matrix->kind);
  const int64_t group_bytes = is_int8 ? INT8_GROUP_BYTES : UINT4_GROUP_BYTES;
  unsigned char* at = matrix->data + n / PW * matrix->panel_bytes;
  const int64_t lane = n % PW;
  for (int64_t g = 0; g < matrix->k / GROUP; ++g, at += group_bytes) {
    const int8_t* q = row.q + g * GROUP;
    if (is_int8) {
      for (int64_t i = 0; i < GROUP; ++i)
        at[(i / 4 * PW + lane) * 4 + i % 4] = (unsigned char)(q[i] + SIGNED_OFFSET);
      ((uint16_t*)(at + GROUP * PW))[lane] = row.scale[g];
    } else {
      for (int64_t i = 0; i < GROUP / 2; ++i)
        at[(i / 4 * PW + lane) * 4 + i % 4] = (unsigned char)(q[i] | q[i + GROUP / 2] << 4);
      uint16_t* scales = (uint16_t*)(at + GROUP * PW / 2);
      scales[lane] = row.scale[g];
      scales[PW + lane] = row.minimum[g];
    }
  }
}

}  // namespace

bool matrix_allocate(PmMatrix* matrix) {
  matrix->num_panels = (matrix->n + PW - 1) / PW;
  const int64_t groups = matrix->k / GROUP;
  switch (matrix->kind) {
    case PM_F32: matrix->panel_bytes = matrix->k * PW * 4; break;
    case PM_INT8:
    case PM_INT8_FAST: matrix->panel_bytes = groups * INT8_GROUP_BYTES; break;
    case PM_UINT4:
    case PM_UINT4_FAST: matrix->panel_bytes = groups * UINT4_GROUP_BYTES; break;
    default: matrix->panel_bytes = matrix->k * PW * 2;
  }
  const int64_t bytes = matrix->num_panels * matrix->panel_bytes;
#if defined(__unix__) || defined(__APPLE__)
  // Huge pages: a step reads all weights once, and a TLB miss per 4 KiB would show.
  matrix->mapping_bytes = bytes + HUGE_PAGE + MARGIN;
  void* p = mmap(nullptr, (size_t)matrix->mapping_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANON, -1, 0);
  if (p == MAP_FAILED) return false;
  matrix->mapping = p;
  matrix->data = (unsigned char*)(((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
  madvise(matrix->data, (size_t)bytes, MADV_HUGEPAGE);
#endif
#else
  matrix->mapping_bytes = bytes + MARGIN;
  matrix->mapping = std::calloc(1, (size_t)matrix->mapping_bytes);
  if (!matrix->mapping) return false;
  matrix->data = (unsigned char*)(((uintptr_t)matrix->mapping + 63) / 64 * 64);
#endif
  return true;
}

void matrix_free(PmMatrix* matrix) {
#if defined(__unix__) || defined(__APPLE__)
  munmap(matrix->mapping, (size_t)matrix->mapping_bytes);
#else
  std::free(matrix->mapping);
#endif
}

int64_t encoded_row_bytes(int64_t encoding, int64_t k) {
  switch (encoding) {
    case PM_ENCODING_F32: return 4 * k;
    case PM_ENCODING_F16:
    case PM_ENCODING_BF16: return 2 * k;
    case PM_ENCODING_Q8_0: return k % 32 ? 0 : k / 32 * 34;
    case PM_ENCODING_Q4_0: return k % 32 ? 0 : k / 32 * 18;
    case PM_ENCODING_Q4_1: return k % 32 ? 0 : k / 32 * 20;
    case PM_ENCODING_Q4_K: return k % 256 ? 0 : k / 256 * 144;
  }
  return 0;
}

bool can_fill(int64_t kind, int64_t encoding) {
  // The scales of q4_k are products that half does not hold exactly: good for uint4 only.
  if (is_uint4(kind)) return encoding >= PM_ENCODING_Q4_0 && encoding <= PM_ENCODING_Q4_K;
  return encoding >= PM_ENCODING_F32 && encoding <= PM_ENCODING_Q4_1;
}

int64_t fill_scratch_floats(int64_t k) { return 2 * k + 64; }

void matrix_fill(PmMatrix* matrix, int64_t row, int64_t rows, int64_t encoding,
                 const unsigned char* data, int64_t row_bytes, int64_t first, int64_t last,
                 float* scratch) {
  const int64_t k = matrix->k, groups = k / GROUP;
  float* numbers = scratch;
  const IntegerRow integers{(int8_t*)(scratch + k), (uint16_t*)(scratch + k + (k + 3) / 4),
                            (uint16_t*)(scratch + k + (k + 3) / 4) + groups};
  const int64_t begin = first * PW > row ? first * PW : row;
  const int64_t end = last * PW < row + rows ? last * PW : row + rows;
  for (int64_t n = begin; n < end; ++n) {
    const unsigned char* source = data + (n - row) * row_bytes;
    switch (encoding) {
      case PM_ENCODING_Q8_0: decode_q8_0(source, groups, integers); break;
      case PM_ENCODING_Q4_0: decode_q4(source, groups, false, integers); break;
      case PM_ENCODING_Q4_1: decode_q4(source, groups, true, integers); break;
      case PM_ENCODING_Q4_K: decode_q4_k(source, groups / 8, integers); break;
      default: decode_float(encoding, source, k, numbers);
    }
    const bool is_block = encoding >= PM_ENCODING_Q8_0;
    const bool keeps = is_uint4(matrix->kind) ||
                       (is_integer(matrix->kind) && encoding == PM_ENCODING_Q8_0);
    if (is_block && !keeps) widen(integers, groups, encoding != PM_ENCODING_Q8_0, numbers);
    if (is_integer(matrix->kind) && !keeps) round_int8(numbers, groups, integers);
    if (is_integer(matrix->kind))
      place_integers(matrix, n, integers);
    else
      place_float(matrix, n, numbers);
  }
}

void matrix_row(const PmMatrix* matrix, int64_t row, float* out) {
  const unsigned char* at = matrix->panel(row / PW);
  const int64_t lane = row % PW, k_count = matrix->k;
  if (matrix->kind == PM_F32) {
    for (int64_t k = 0; k < k_count; ++k) out[k] = ((const float*)at)[k * PW + lane];
  } else if (!is_integer(matrix->kind)) {
    for (int64_t k = 0; k < k_count; ++k) {
      const uint16_t bits = ((const uint16_t*)at)[k * PW + lane];
      const uint32_t wide = (uint32_t)bits << 16;
      if (matrix->kind == PM_F16)
        out[k] = half_to_float(bits);
      else
        std::memcpy(out + k, &wide, 4);
    }
  } else if (!is_uint4(matrix->kind)) {
    for (int64_t g = 0; g < k_count / GROUP; ++g, at += INT8_GROUP_BYTES) {
      const float scale = half_to_float(((const uint16_t*)(at + GROUP * PW))[lane]);
      for (int64_t i = 0; i < GROUP; ++i) {
        const unsigned char q = at[(i / 4 * PW + lane) * 4 + i % 4];
        out[g * GROUP + i] = scale * (float)(SIGNED_OFFSET ? q - SIGNED_OFFSET : (int8_t)q);
      }
    }
  } else {
    for (int64_t g = 0; g < k_count / GROUP; ++g, at += UINT4_GROUP_BYTES) {
      const uint16_t* scales = (const uint16_t*)(at + GROUP * PW / 2);
      const float scale = half_to_float(scales[lane]), low = half_to_float(scales[PW + lane]);
      for (int64_t i = 0; i < GROUP; ++i) {
        const unsigned char pair = at[(i % 16 / 4 * PW + lane) * 4 + i % 4];
        out[g * GROUP + i] = scale * (float)(i < 16 ? pair & 15 : pair >> 4) + low;
      }
    }
  }
}

}  // namespace pm
