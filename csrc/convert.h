// float <-> float16 and bfloat16 by integer arithmetic without branches, so that a loop over it is vectorized for any
// x86-64 (the headers' own conversions are used on CUDA). Rounds to nearest even; NaN stays NaN.
#pragma once

#include <cstring>

#include "common.h"

namespace apexfx {

APEXFX_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

APEXFX_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

APEXFX_HD float bfloat16_to_float(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

APEXFX_HD uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Exponent and mantissa are moved into place and the bias corrected by a multiplication, which is exact also for
// subnormals (they are subtracted from a constant instead). https://github.com/Maratyszcza/FP16
APEXFX_HD float float16_to_float(uint16_t x) {
  const uint32_t w = static_cast<uint32_t>(x) << 16;
  const uint32_t sign = w & 0x80000000u, two_w = w + w;
  const float normal = float_of((two_w >> 4) + (0xe0u << 23)) * float_of(0x07800000u);  // 2^-112
  const float subnormal = float_of((two_w >> 17) | (126u << 23)) - 0.5f;
  return float_of(sign | (two_w < (1u << 27) ? bits_of(subnormal) : bits_of(normal)));
}

APEXFX_HD uint16_t float_to_float16(float value) {
  const uint32_t w = bits_of(value), two_w = w + w, sign = w & 0x80000000u;
  const float magnitude = float_of(w & 0x7fffffffu);
  float base = (magnitude * float_of(0x77800000u)) * float_of(0x08800000u);  // * 2^112 * 2^-110: overflow to infinity
  uint32_t bias = two_w & 0xff000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  base = float_of((bias >> 1) + 0x07800000u) + base;
  const uint32_t bits = bits_of(base);
  const uint32_t finite = ((bits >> 13) & 0x00007c00u) + (bits & 0x00000fffu);
  return static_cast<uint16_t>((sign >> 16) | (two_w > 0xff000000u ? 0x7e00u : finite));
}

}  // namespace apexfx
