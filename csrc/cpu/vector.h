// Blocks of elements between any floating dtype and a float scratch buffer that stays in the L1 cache. CPU kernels
// read a block of each operand into scratch (float32 operands are used in place), compute, and write back.
#pragma once

#include "../convert.h"

namespace apexfx {

constexpr int64_t kBlock = 1024;  // elements of scratch per operand: 4 KiB

// Element conversions, vectorized for the machine they run on (csrc/cpu/convert.cpp).
void widen(const BFloat16* in, float* out, int64_t n);
void widen(const Half* in, float* out, int64_t n);
void narrow(const float* in, BFloat16* out, int64_t n);
void narrow(const float* in, Half* out, int64_t n);

// Returns a pointer to `n` floats with the values of `data`, which is `scratch` unless they are float32 already.
const float* load(const void* data, ScalarType dtype, float* scratch, int64_t n);
// Writes `n` floats as `dtype`; does nothing where `values` is the destination itself.
void store(const float* values, void* data, ScalarType dtype, int64_t n);

inline int64_t element_size(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

inline const void* element(const void* data, ScalarType dtype, int64_t i) {
  return static_cast<const char*>(data) + i * element_size(dtype);
}
inline void* element(void* data, ScalarType dtype, int64_t i) {
  return static_cast<char*>(data) + i * element_size(dtype);
}

}  // namespace apexfx
