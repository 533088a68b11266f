// The loops over planes: see batch_norm_loops.h. Sums of a channel stay in lanes of double from plane to plane, so that
// a plane of 7 x 7 costs little more than its vectors.
#include "batch_norm_vectors.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <bool kRelu, typename V>
APEXFX_HD V finish(const V& y) {
  return kRelu ? (y < V{} ? V{} : y) : y;  // NaN stays
}

// The gradient that passes the ReLU, whose input is computed again from x - center.
template <bool kRelu, typename V, typename T>
APEXFX_HD V masked(const V& grad, const V& centered, T scale, T shift, T zero) {
  return kRelu ? (centered * scale + shift <= zero ? V{} : grad) : grad;
}

template <typename E, typename T>
APEXFX_HD void sums_loop(const E* x, int64_t inner, int64_t channels, const T* shift, LaneSums* sums) {
  for (int64_t c = 0; c < channels; ++c, x += inner) {
    const T from = shift[c];
    const auto terms = [from](const Vector<T>& v) __attribute__((always_inline)) {
      const Vector<T> d = v - from;
      return Pair<T>{d, d * d};
    };
    add_terms<E>(inner, sums[c], terms, x);
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void normalize_loop(const Constants<T>& of, const E* x, const E* residual, E* y, int64_t inner,
                              int64_t channels) {
  for (int64_t c = 0; c < channels; ++c, x += inner, y += inner) {
    const Affine<T> affine{of.center[c], of.scale[c], of.shift[c]};
    if (residual == nullptr) {
      const auto f = [affine](const Vector<T>& v) __attribute__((always_inline)) { return finish<kRelu>(affine(v)); };
      map_elements<E>(inner, y, f, x);
      continue;
    }
    const auto f = [affine](const Vector<T>& v, const Vector<T>& r) __attribute__((always_inline)) {
      return finish<kRelu>(affine(v) + r);
    };
    map_elements<E>(inner, y, f, x, residual);
    residual += inner;
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_sums_loop(const Constants<T>& of, const E* grad, const E* x, int64_t inner, int64_t channels,
                                  LaneSums* sums) {
  for (int64_t c = 0; c < channels; ++c, x += inner, grad += inner) {
    const T center = of.center[c], scale = of.scale[c], shift = of.shift[c], zero = of.zero;
    const auto terms = [=](const Vector<T>& g, const Vector<T>& v) __attribute__((always_inline)) {
      const Vector<T> d = v - center, passed = masked<kRelu>(g, d, scale, shift, zero);
      return Pair<T>{passed, passed * d};
    };
    add_terms<E>(inner, sums[c], terms, grad, x);
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_loop(const Constants<T>& of, const E* grad, const E* x, E* dx, int64_t inner,
                             int64_t channels) {
  for (int64_t c = 0; c < channels; ++c, x += inner, grad += inner, dx += inner) {
    const T center = of.center[c], scale = of.scale[c], shift = of.shift[c], zero = of.zero;
    const InputGradient<T> gradient{of.per_grad[c], of.per_x[c], of.constant[c]};
    const auto f = [=](const Vector<T>& g, const Vector<T>& v) __attribute__((always_inline)) {
      const Vector<T> d = v - center;
      return gradient(masked<kRelu>(g, d, scale, shift, zero), d);
    };
    map_elements<E>(inner, dx, f, grad, x);
  }
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
