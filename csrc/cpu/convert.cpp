// Element conversions, compiled for AVX-512, AVX2 and plain x86-64 (see APEXFX_CLONES).
#include <cstring>

#include "vector.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define APEXFX_F16C 1
#endif

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

#ifdef APEXFX_F16C
// The processor's own conversions, which compilers do not find in the arithmetic above: same results, NaN payloads apart.
const bool has_f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");

__attribute__((target("avx2,f16c"))) int64_t widen_blocks(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  return i;
}
__attribute__((target("avx2,f16c"))) int64_t narrow_blocks(const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  return i;
}
#else
constexpr bool has_f16c = false;
int64_t widen_blocks(const uint16_t*, float*, int64_t) { return 0; }
int64_t narrow_blocks(const float*, uint16_t*, int64_t) { return 0; }
#endif

}  // namespace

void widen(const BFloat16* in, float* out, int64_t n) { widen_bfloat16(reinterpret_cast<const uint16_t*>(in), out, n); }
void widen(const Half* in, float* out, int64_t n) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(in);
  const int64_t done = has_f16c ? widen_blocks(bits, out, n) : 0;
  if (done < n) widen_float16(bits + done, out + done, n - done);
}
void narrow(const float* in, BFloat16* out, int64_t n) { narrow_bfloat16(in, reinterpret_cast<uint16_t*>(out), n); }
void narrow(const float* in, Half* out, int64_t n) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(out);
  const int64_t done = has_f16c ? narrow_blocks(in, bits, n) : 0;
  if (done < n) narrow_float16(in + done, bits + done, n - done);
}

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
