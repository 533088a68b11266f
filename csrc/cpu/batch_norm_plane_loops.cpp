// The loops over planes: see batch_norm_loops.h. Sums of a channel stay in lanes of double from plane to plane, so that
// a plane of 7 x 7 costs little more than its vectors.
#include "batch_norm_formulas.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <typename E, typename T>
APEXFX_HD void sums_loop(const E* x, int64_t inner, int64_t channels, const T* shift, LaneSums* sums) {
  for (int64_t c = 0; c < channels; ++c, x += inner) add_terms<E>(inner, sums[c], ShiftedTerms<T>{shift[c]}, x);
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void normalize_loop(const Constants<T>& of, const E* x, const E* residual, E* y, int64_t inner,
                              int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Normalize<kRelu, T, T> f(of, c);
    const int64_t at = c * inner;
    if (residual == nullptr) map_elements<E>(inner, y + at, f, x + at);
    else map_elements<E>(inner, y + at, f, x + at, residual + at);
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_sums_loop(const Constants<T>& of, const E* grad, const E* x, int64_t inner, int64_t channels,
                                  LaneSums* sums) {
  for (int64_t c = 0; c < channels; ++c, x += inner, grad += inner)
    add_terms<E>(inner, sums[c], GradientTerms<kRelu, T, T>(of, c), grad, x);
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_loop(const Constants<T>& of, const E* grad, const E* x, E* dx, int64_t inner,
                             int64_t channels) {
  for (int64_t c = 0; c < channels; ++c, x += inner, grad += inner, dx += inner)
    map_elements<E>(inner, dx, Gradient<kRelu, T, T>(of, c), grad, x);
}

}  // namespace

#define APEXFX_LOOPS(E, T)                                                                                         \
  APEXFX_CLONES void plane_sums(const E* x, int64_t inner, int64_t channels, const T* shift, LaneSums* sums) {     \
    sums_loop(x, inner, channels, shift, sums);                                                                    \
  }                                                                                                                \
  APEXFX_CLONES void plane_normalize(const Constants<T>& of, const E* x, const E* r, E* y, int64_t n, int64_t c) { \
    of.relu ? normalize_loop<true>(of, x, r, y, n, c) : normalize_loop<false>(of, x, r, y, n, c);                  \
  }                                                                                                                \
  APEXFX_CLONES void plane_gradient_sums(const Constants<T>& of, const E* g, const E* x, int64_t n, int64_t c,     \
                                         LaneSums* s) {                                                            \
    of.relu ? gradient_sums_loop<true>(of, g, x, n, c, s) : gradient_sums_loop<false>(of, g, x, n, c, s);          \
  }                                                                                                                \
  APEXFX_CLONES void plane_gradient(const Constants<T>& of, const E* g, const E* x, E* dx, int64_t n, int64_t c) { \
    of.relu ? gradient_loop<true>(of, g, x, dx, n, c) : gradient_loop<false>(of, g, x, dx, n, c);                  \
  }

APEXFX_LOOPS(float, float)
APEXFX_LOOPS(double, double)
APEXFX_LOOPS(Bf16, float)

}  // namespace batch_norm
}  // namespace apexfx
