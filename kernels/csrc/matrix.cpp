// Weight matrices: memory, and repacking of stored rows into panels. A kind that can hold a
// block's integers keeps them; otherwise the row becomes float32 first and is rounded to the kind.
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

bool can_fill(int64_t kind, int64_t encoding) {
  if (is_uint4(kind)) return encoding >= PM_ENCODING_Q4_0 && encoding <= PM_ENCODING_Q4_K;
  return encoding >= PM_ENCODING_F32 && encoding <= PM_ENCODING_Q6_K;
}

// Three rows of numbers, then the integers and scales of one.
int64_t fill_scratch_floats(int64_t k) { return 3 * k + 64; }

void matrix_fill(PmMatrix* matrix, const EncodedRows& rows, int64_t first, int64_t last,
                 float* scratch, double* squares) {
  const int64_t k = matrix->k, groups = k / GROUP;
  const bool has_minimum = is_uint4(matrix->kind);
  // The scales of q4_k are products that half does not hold exactly.
  const bool keeps = is_integer(matrix->kind)
                         ? has_minimum || rows.encoding == PM_ENCODING_Q8_0
                         : matrix->kind == PM_F32;
  const bool is_exact = keeps && rows.encoding != PM_ENCODING_Q4_K;
  float *numbers = scratch, *kept = scratch + k;
  int8_t* q = (int8_t*)(scratch + 2 * k);
  uint16_t* scales = (uint16_t*)(q + (k + 3) / 4 * 4);
  const IntegerRow integers{q, scales, scales + groups};
  const int64_t begin = first * PW > rows.row ? first * PW : rows.row;
  const int64_t end = last * PW < rows.row + rows.count ? last * PW : rows.row + rows.count;
  for (int64_t n = begin; n < end; ++n) {
    const unsigned char* source = rows.data + (n - rows.row) * rows.row_bytes;
    if (!is_integer(matrix->kind) || !is_exact) decode_numbers(rows.encoding, source, k, numbers);
    if (!is_integer(matrix->kind)) {
      place_float(matrix, n, numbers);
    } else {
      if (keeps)
        decode_integers(rows.encoding, source, k, integers);
      else
        round_int8(numbers, groups, integers);
      place_integers(matrix, n, integers);
    }
    if (is_exact) continue;
    matrix_row(matrix, n, kept);
    for (int64_t i = 0; i < k; ++i) {
      const double error = (double)kept[i] - numbers[i];
      squares[0] += error * error;
      squares[1] += (double)numbers[i] * numbers[i];
    }
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
