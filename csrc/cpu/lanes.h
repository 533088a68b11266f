// What loops written for the compiler to vectorize share: elements of any dtype as what they are computed in, and the sum
// of an array of running sums. For functions marked APEXFX_CLONES.
#pragma once

#include <cstring>

#include "../convert.h"

namespace apexfx {

APEXFX_HD float value(float x) { return x; }
APEXFX_HD double value(double x) { return x; }
APEXFX_HD float value(const BFloat16& x) { return bfloat16_to_float(x.x); }
APEXFX_HD float value(const Half& x) { return float16_to_float(x.x); }
APEXFX_HD void assign(float& out, float x) { out = x; }
APEXFX_HD void assign(double& out, double x) { out = x; }
APEXFX_HD void assign(BFloat16& out, float x) { out.x = float_to_bfloat16(x); }
APEXFX_HD void assign(Half& out, float x) { out.x = float_to_float16(x); }

// Pairwise, half of the lanes at once: the compiler adds a loop over them up one by one.
template <int64_t kCount, typename T>
APEXFX_HD double add_lanes(const T* lanes) {
  if constexpr (kCount == 1) {
    return static_cast<double>(lanes[0]);
  } else {
    typedef T Vector __attribute__((vector_size(kCount / 2 * sizeof(T))));
    Vector low, high;
    std::memcpy(&low, lanes, sizeof(Vector)), std::memcpy(&high, lanes + kCount / 2, sizeof(Vector));
    low += high;
    T half[kCount / 2];
    std::memcpy(half, &low, sizeof(Vector));
    return add_lanes<kCount / 2>(half);
  }
}

}  // namespace apexfx
