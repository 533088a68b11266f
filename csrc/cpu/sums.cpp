// Block reductions. A compiler may not reorder a float sum, so the lanes are written out: kLanes independent sums that
// become vector registers, added at the end in a fixed order.
#include "sums.h"

#include <cmath>
#include <cstring>

namespace apexfx {
namespace {

constexpr int kLanes = 16;

APEXFX_CLONES double square_sum_loop(const float* __restrict__ x, int64_t n) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int k = 0; k < kLanes; ++k) {
      const double value = x[i + k];
      lanes[k] += value * value;
    }
  double total = 0.0;
  for (; i < n; ++i) total += static_cast<double>(x[i]) * x[i];
  for (int k = 0; k < kLanes; ++k) total += lanes[k];
  return total;
}

// The largest bit pattern of |x|: it orders as the values do, and NaN comes above infinity.
APEXFX_CLONES uint32_t max_bits_loop(const float* __restrict__ x, int64_t n) {
  uint32_t result = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    result = bits > result ? bits : result;
  }
  return result;
}

}  // namespace

double square_sum(const float* x, int64_t n) { return square_sum_loop(x, n); }

double square_sum(const double* x, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += x[i] * x[i];
  return total;
}

double max_abs(const float* x, int64_t n) { return float_of(max_bits_loop(x, n)); }

double max_abs(const double* x, int64_t n) {
  double result = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double magnitude = std::fabs(x[i]);
    if (!(magnitude <= result)) result = magnitude;
    if (result != result) return result;
  }
  return result;
}

bool any_non_finite(const float* x, int64_t n) { return max_bits_loop(x, n) >= 0x7f800000u; }

bool any_non_finite(const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!std::isfinite(x[i])) return true;
  return false;
}

}  // namespace apexfx
