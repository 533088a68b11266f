// The inner loops of batch norm, on float, double or bfloat16 in memory: planes, one channel after the other, or rows
// of channels. Vectorized for the machine they run on (see APEXFX_CLONES).
#pragma once

#include "../batch_norm.h"
#include "../convert.h"

namespace apexfx {
namespace batch_norm {

// bfloat16 as the loops see it: bits.
struct Bf16 {
  uint16_t bits;
};

// What a loop does to the elements of each channel, one value a channel; those of the gradient may be null.
template <typename T>
struct Constants {
  const T *center, *scale, *shift;
  const T *per_grad, *per_x, *constant;
  bool relu;
  T zero;  // the largest value that the ReLU's mask cuts

  Constants from(int64_t channel) const {
    Constants out = *this;
    for (const T** v : {&out.center, &out.scale, &out.shift}) *v += channel;
    if (per_grad == nullptr) return out;
    for (const T** v : {&out.per_grad, &out.per_x, &out.constant}) *v += channel;
    return out;
  }
};

// Two running sums of a channel of planes, in lanes.
struct alignas(64) LaneSums {
  double first[4], second[4];
};

#define APEXFX_BATCH_NORM_LOOPS(E, T)                                                                                 \
  /* Planes: `inner` elements of each of `channels` channels, one after the other. `residual` may be null. */         \
  /* sums[c] += [sum, sum of squares] of x - shift[c] */                                                              \
  void plane_sums(const E* x, int64_t inner, int64_t channels, const T* shift, LaneSums* sums);                       \
  void plane_normalize(const Constants<T>& of, const E* x, const E* residual, E* y, int64_t inner, int64_t channels); \
  /* sums[c] += [sum g, sum g * (x - center)] */                                                                      \
  void plane_gradient_sums(const Constants<T>& of, const E* grad, const E* x, int64_t inner, int64_t channels,        \
                           LaneSums* sums);                                                                           \
  void plane_gradient(const Constants<T>& of, const E* grad, const E* x, E* dx, int64_t inner, int64_t channels);     \
  /* Rows: n elements, `width` a row. */                                                                              \
  /* total[j] += x[i][j] - shift[j], of_squares[j] += its square */                                                   \
  void row_sums(const E* x, const T* shift, T* total, T* of_squares, int64_t width, int64_t n);                       \
  void row_normalize(const Constants<T>& of, const E* x, const E* residual, E* y, int64_t width, int64_t n);          \
  /* total[j] += g[i][j], centered[j] += g[i][j] * (x[i][j] - center[j]) */                                           \
  void row_gradient_sums(const Constants<T>& of, const E* grad, const E* x, T* total, T* centered, int64_t width,     \
                         int64_t n);                                                                                  \
  void row_gradient(const Constants<T>& of, const E* grad, const E* x, E* dx, int64_t width, int64_t n);

APEXFX_BATCH_NORM_LOOPS(float, float)
APEXFX_BATCH_NORM_LOOPS(double, double)
APEXFX_BATCH_NORM_LOOPS(Bf16, float)
#undef APEXFX_BATCH_NORM_LOOPS

// Vectors of `channels` elements.

// mean and 1 / sqrt(var + eps) from the sums of `count` values
void channel_moments(double count, const double* total, const double* of_squares, double eps, double* mean,
                     double* invstd, int64_t channels);
// the mean and the unbiased variance
void channel_unbiased(double count, const double* total, const double* of_squares, double* mean, double* var,
                      int64_t channels);
// whether the sums of any channel were taken too far from its mean
bool any_is_far(double count, const double* total, const double* of_squares, int64_t channels);
void channel_moved(const double* batch, double share, double* running, int64_t channels);
void channel_moved(const double* batch, double share, float* running, int64_t channels);

#define APEXFX_BATCH_NORM_VECTORS(T)                                                                                  \
  void channel_affine(const double* mean, const double* invstd, const double* weight, const double* bias, T* center, \
                      T* scale, T* shift, int64_t channels);                                                          \
  void channel_input_gradient(const double* mean, const double* invstd, const double* weight, const double* sum_grad, \
                              const double* sum_centered, double count, T* per_grad, T* per_x, T* constant,           \
                              int64_t channels);                                                                      \
  /* the sums of x and its square, from those of x - shift */                                                         \
  void channel_unshifted(double count, const T* shift, double* total, double* of_squares, int64_t channels);          \
  /* into[c] += from[c], and from is cleared */                                                                       \
  void channel_flush(T* from, double* into, int64_t channels);

APEXFX_BATCH_NORM_VECTORS(float)
APEXFX_BATCH_NORM_VECTORS(double)
#undef APEXFX_BATCH_NORM_VECTORS

}  // namespace batch_norm
}  // namespace apexfx
