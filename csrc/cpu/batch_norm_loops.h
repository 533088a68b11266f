// The inner loops of batch norm, on float, double or bfloat16 in memory: one plane with the constants of its channel,
// or rows of channels with the constants in vectors as long as a row. Vectorized for the machine they run on (see
// APEXFX_CLONES).
#pragma once

#include "../batch_norm.h"
#include "../convert.h"

namespace apexfx {
namespace batch_norm {

// bfloat16 as the loops see it: bits.
struct Bf16 {
  uint16_t bits;
};

// What a loop does to each element; `residual` may be null, `zero` is the largest value that the ReLU's mask cuts.
template <typename T>
struct Plane {
  Affine<T> affine;
  InputGradient<T> gradient;
  bool relu;
  T zero;
};

// The same with vectors of `width` instead of numbers.
template <typename T>
struct Rows {
  const T *center, *scale, *shift;
  const T *per_grad, *per_x, *constant;
  bool relu;
  T zero;
  int64_t width;
};

#define APEXFX_BATCH_NORM_LOOPS(E, T)                                                                          \
  /* out += [sum, sum of squares] of x */                                                                      \
  void plane_sums(const E* x, int64_t n, double* out);                                                         \
  void plane_normalize(const Plane<T>& plane, const E* x, const E* residual, E* y, int64_t n);                 \
  /* out += [sum g, sum g * (x - center)] */                                                                   \
  void plane_gradient_sums(const Plane<T>& plane, const E* grad, const E* x, int64_t n, double* out);          \
  void plane_gradient(const Plane<T>& plane, const E* grad, const E* x, E* dx, int64_t n);                     \
  /* total[j] += x[i][j] - shift[j], of_squares[j] += its square; n elements, `width` a row */                 \
  void row_sums(const E* x, const T* shift, T* total, T* of_squares, int64_t width, int64_t n);                \
  void row_normalize(const Rows<T>& rows, const E* x, const E* residual, E* y, int64_t n);                     \
  /* total[j] += g[i][j], centered[j] += g[i][j] * (x[i][j] - center[j]) */                                    \
  void row_gradient_sums(const Rows<T>& rows, const E* grad, const E* x, T* total, T* centered, int64_t n);    \
  void row_gradient(const Rows<T>& rows, const E* grad, const E* x, E* dx, int64_t n);

APEXFX_BATCH_NORM_LOOPS(float, float)
APEXFX_BATCH_NORM_LOOPS(double, double)
APEXFX_BATCH_NORM_LOOPS(Bf16, float)
#undef APEXFX_BATCH_NORM_LOOPS

}  // namespace batch_norm
}  // namespace apexfx
