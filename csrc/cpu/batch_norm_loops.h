// The inner loops of batch norm over float, double, bfloat16 or float16 in memory, vectorized for the machine they run on
// (see APEXFX_CLONES). x is cut into matrices, whose rows belong to one channel each (contiguous x) or whose columns do
// (channels_last).
#pragma once

#include "../batch_norm.h"
#include "../convert.h"

namespace apexfx {
namespace batch_norm {

// [rows][width] neighbouring elements.
struct Matrix {
  int64_t rows, width;
  bool channels_last;  // the channel is the column; else it is the row
};

// What the loops do to the elements of each channel, one value a channel.
template <typename T>
struct Constants {
  const T *center, *scale, *shift;         // y = (x - center) * scale + shift
  const T *per_grad, *per_x, *constant;    // dx = g * per_grad + (x - center) * per_x + constant
  bool relu;
  T zero;  // the largest value that the ReLU's mask cuts
};

#define APEXFX_BATCH_NORM_LOOPS(E, T)                                                                                  \
  /* total[c] += the sum of x - shift[c], of_squares[c] += that of its square */                                       \
  void add_sums(const Matrix& m, const E* x, const T* shift, double* total, double* of_squares);                       \
  /* total[c] += the sum of g, centered[c] += that of g * (x - center) */                                              \
  void add_gradient_sums(const Matrix& m, const Constants<T>& of, const E* grad, const E* x, double* total,            \
                         double* centered);                                                                            \
  /* `residual` may be null */                                                                                         \
  void normalize_matrix(const Matrix& m, const Constants<T>& of, const E* x, const E* residual, E* y);                 \
  void gradient_matrix(const Matrix& m, const Constants<T>& of, const E* grad, const E* x, E* dx);

APEXFX_BATCH_NORM_LOOPS(float, float)
APEXFX_BATCH_NORM_LOOPS(double, double)
APEXFX_BATCH_NORM_LOOPS(BFloat16, float)
APEXFX_BATCH_NORM_LOOPS(Half, float)
#undef APEXFX_BATCH_NORM_LOOPS

// The mean and 1 / sqrt(var + eps) of each channel from the sums of `count` values.
void channel_moments(double count, const double* total, const double* of_squares, double eps, double* mean,
                     double* invstd, int64_t channels);

}  // namespace batch_norm
}  // namespace apexfx
