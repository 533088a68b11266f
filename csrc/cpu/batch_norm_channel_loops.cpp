// The loops over vectors of channels: see batch_norm_loops.h.
#include <cmath>

#include "batch_norm_loops.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <typename T>
APEXFX_HD void affine_loop(const double* __restrict__ mean, const double* __restrict__ invstd,
                           const double* __restrict__ weight, const double* __restrict__ bias, T* __restrict__ center,
                           T* __restrict__ scale, T* __restrict__ shift, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Affine<T> a = affine<T>(mean[c], invstd[c], weight[c], bias[c]);
    center[c] = a.center, scale[c] = a.scale, shift[c] = a.shift;
  }
}

template <typename T>
APEXFX_HD void input_gradient_loop(const double* __restrict__ mean, const double* __restrict__ invstd,
                                   const double* __restrict__ weight, const double* __restrict__ sum_grad,
                                   const double* __restrict__ sum_centered, double count, T* __restrict__ per_grad,
                                   T* __restrict__ per_x, T* __restrict__ constant, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const auto g = input_gradient<T>(mean[c], invstd[c], weight[c], sum_grad[c], sum_centered[c], count);
    per_grad[c] = g.per_grad, per_x[c] = g.per_x, constant[c] = g.constant;
  }
}

template <typename T>
APEXFX_HD void unshifted_loop(double count, const T* __restrict__ shift, double* __restrict__ total,
                              double* __restrict__ of_squares, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Sums sums = unshifted(count, static_cast<double>(shift[c]), total[c], of_squares[c]);
    total[c] = sums.total, of_squares[c] = sums.of_squares;
  }
}

template <typename T>
APEXFX_HD void flush_loop(T* __restrict__ from, double* __restrict__ into, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    into[c] += static_cast<double>(from[c]);
    from[c] = 0;
  }
}

template <typename T>
APEXFX_HD void moved_loop(const double* __restrict__ batch, double share, T* __restrict__ running, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c)
    running[c] = static_cast<T>(moved(static_cast<double>(running[c]), batch[c], share));
}

}  // namespace

APEXFX_CLONES void channel_moments(double count, const double* __restrict__ total,
                                   const double* __restrict__ of_squares, double eps, double* __restrict__ mean,
                                   double* __restrict__ invstd, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(count, total[c], of_squares[c]);
    mean[c] = m.mean;
    invstd[c] = 1 / std::sqrt(m.var + eps);
  }
}

APEXFX_CLONES void channel_unbiased(double count, const double* __restrict__ total,
                                    const double* __restrict__ of_squares, double* __restrict__ mean,
                                    double* __restrict__ var, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(count, total[c], of_squares[c]);
    mean[c] = m.mean;
    var[c] = unbiased(m);
  }
}

APEXFX_CLONES bool any_is_far(double count, const double* __restrict__ total, const double* __restrict__ of_squares,
                              int64_t channels) {
  int64_t far = 0;
  for (int64_t c = 0; c < channels; ++c) far += is_far(count, total[c], of_squares[c]);
  return far > 0;
}

APEXFX_CLONES void channel_moved(const double* batch, double share, double* running, int64_t channels) {
  moved_loop(batch, share, running, channels);
}
APEXFX_CLONES void channel_moved(const double* batch, double share, float* running, int64_t channels) {
  moved_loop(batch, share, running, channels);
}

#define APEXFX_VECTORS(T)                                                                                              \
  APEXFX_CLONES void channel_affine(const double* mean, const double* invstd, const double* weight,                    \
                                    const double* bias, T* center, T* scale, T* shift, int64_t channels) {             \
    affine_loop(mean, invstd, weight, bias, center, scale, shift, channels);                                           \
  }                                                                                                                    \
  APEXFX_CLONES void channel_input_gradient(const double* mean, const double* invstd, const double* weight,            \
                                            const double* sum_grad, const double* sum_centered, double count,          \
                                            T* per_grad, T* per_x, T* constant, int64_t channels) {                    \
    input_gradient_loop(mean, invstd, weight, sum_grad, sum_centered, count, per_grad, per_x, constant, channels);     \
  }                                                                                                                    \
  APEXFX_CLONES void channel_unshifted(double count, const T* shift, double* total, double* of_squares,                \
                                       int64_t channels) {                                                             \
    unshifted_loop(count, shift, total, of_squares, channels);                                                         \
  }                                                                                                                    \
  APEXFX_CLONES void channel_flush(T* from, double* into, int64_t channels) { flush_loop(from, into, channels); }

APEXFX_VECTORS(float)
APEXFX_VECTORS(double)

}  // namespace batch_norm
}  // namespace apexfx
