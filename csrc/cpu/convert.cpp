// Element conversions, compiled for AVX-512, AVX2 and plain x86-64 (see APEXFX_CLONES).
#include <cstring>

#include "vector.h"

namespace apexfx {
namespace {

APEXFX_CLONES void widen_bfloat16(const uint16_t* __restrict__ in, float* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i]);
}
APEXFX_CLONES void widen_float16(const uint16_t* __restrict__ in, float* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float16_to_float(in[i]);
}
APEXFX_CLONES void narrow_bfloat16(const float* __restrict__ in, uint16_t* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_to_bfloat16(in[i]);
}
APEXFX_CLONES void narrow_float16(const float* __restrict__ in, uint16_t* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_to_float16(in[i]);
}
APEXFX_CLONES void divide_floats(const float* in, float* out, float divisor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] / divisor;
}

}  // namespace

void widen(const BFloat16* in, float* out, int64_t n) { widen_bfloat16(reinterpret_cast<const uint16_t*>(in), out, n); }
void widen(const Half* in, float* out, int64_t n) { widen_float16(reinterpret_cast<const uint16_t*>(in), out, n); }
void narrow(const float* in, BFloat16* out, int64_t n) { narrow_bfloat16(in, reinterpret_cast<uint16_t*>(out), n); }
void narrow(const float* in, Half* out, int64_t n) { narrow_float16(in, reinterpret_cast<uint16_t*>(out), n); }
void divide(const float* in, float* out, float divisor, int64_t n) { divide_floats(in, out, divisor, n); }

const float* load(const void* data, ScalarType dtype, float* scratch, int64_t n) {
  switch (dtype) {
    case ScalarType::Float: return static_cast<const float*>(data);
    case ScalarType::Half: widen(static_cast<const Half*>(data), scratch, n); return scratch;
    case ScalarType::BFloat16: widen(static_cast<const BFloat16*>(data), scratch, n); return scratch;
    default: {
      const double* wide = static_cast<const double*>(data);
      for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<float>(wide[i]);
      return scratch;
    }
  }
}

void store(const float* values, void* data, ScalarType dtype, int64_t n) {
  switch (dtype) {
    case ScalarType::Float:
      if (values != data) memcpy(data, values, n * sizeof(float));
      return;
    case ScalarType::Half: narrow(values, static_cast<Half*>(data), n); return;
    case ScalarType::BFloat16: narrow(values, static_cast<BFloat16*>(data), n); return;
    default: {
      double* wide = static_cast<double*>(data);
      for (int64_t i = 0; i < n; ++i) wide[i] = values[i];
    }
  }
}

}  // namespace apexfx
