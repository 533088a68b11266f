// Arithmetic of layer norm and RMS norm, shared by the CPU and the CUDA kernels: what runs on the CPU in CI is the
// formula that runs on the GPU. A row x of n columns, with weight w and bias b:
//
//   layer norm: mean = sum(x) / n, rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)
//   RMS norm:   mean = 0,          rstd = 1 / sqrt(sum(x^2) / n + eps), b = 0
//   h = (x - mean) * rstd,  y = h * w + b
//   with g = dy * w:  dx = (g - (sum(g) / n + h * sum(g * h) / n)) * rstd     (RMS norm: without sum(g))
//   dw = sum over rows of dy * h,  db = sum over rows of dy
//
// T is the accumulation type: float, or double for float64 tensors.
#pragma once

#include "common.h"

namespace apexfx {
namespace norm {

template <typename T>
APEXFX_HD T normalized(T x, T mean, T rstd) {
  return (x - mean) * rstd;
}

template <typename T>
APEXFX_HD T affine(T h, T weight, T bias) {
  return h * weight + bias;
}

// |w| >= eps with the sign of w; zero counts as positive. NaN stays NaN.
template <typename T>
APEXFX_HD T clamp_by_magnitude(T weight, T eps) {
  const T positive = weight < eps ? eps : weight;
  const T negative = weight > -eps ? -eps : weight;
  return weight < T(0) ? negative : positive;
}

// h from y: the memory-efficient backward.
template <typename T>
APEXFX_HD T recovered(T y, T weight, T bias, T eps) {
  return (y - bias) / clamp_by_magnitude(weight, eps);
}

template <typename T>
APEXFX_HD T input_gradient(T g, T h, T mean_g, T mean_gh, T rstd) {
  return (g - (mean_g + h * mean_gh)) * rstd;
}

}  // namespace norm
}  // namespace apexfx
