// What batch norm does to an element, once for both layouts: X is a vector of elements, or one of them; C is what its
// channels' constants are kept in, a scalar where all of X belong to one channel (planes), else like X (rows).
#pragma once

#include "batch_norm_vectors.h"

namespace apexfx {
namespace batch_norm {

template <bool kRelu, typename X>
APEXFX_HD X finish(const X& y) {
  return kRelu ? (y < X{} ? X{} : y) : y;  // NaN stays
}

// [x - k, its square]
template <typename C>
struct ShiftedTerms {
  C shift;
  template <typename X>
  APEXFX_HD Pair<X> operator()(const X& x) const {
    const X d = x - shift;
    return {d, d * d};
  }
};

template <bool kRelu, typename C, typename T>
struct Normalize {
  Affine<C> affine;
  APEXFX_HD Normalize(const Constants<T>& of, int64_t channel)
      : affine{load<C>(of.center + channel), load<C>(of.scale + channel), load<C>(of.shift + channel)} {}
  template <typename X>
  APEXFX_HD X operator()(const X& x) const {
    return finish<kRelu, X>(affine(x));
  }
  template <typename X>
  APEXFX_HD X operator()(const X& x, const X& residual) const {
    return finish<kRelu, X>(affine(x) + residual);
  }
};

// The gradient that passes the ReLU, whose input is computed again from x, and x - center.
template <bool kRelu, typename C, typename T>
struct Passed {
  C center, scale, shift;
  T zero;
  APEXFX_HD Passed(const Constants<T>& of, int64_t channel)
      : center(load<C>(of.center + channel)), scale(load<C>(of.scale + channel)), shift(load<C>(of.shift + channel)),
        zero(of.zero) {}
  template <typename X>
  APEXFX_HD Pair<X> operator()(const X& grad, const X& x) const {
    const X d = x - center;
    return {kRelu ? (d * scale + shift <= zero ? X{} : grad) : grad, d};
  }
};

// [g, g * (x - center)]
template <bool kRelu, typename C, typename T>
struct GradientTerms {
  Passed<kRelu, C, T> passed;
  APEXFX_HD GradientTerms(const Constants<T>& of, int64_t channel) : passed(of, channel) {}
  template <typename X>
  APEXFX_HD Pair<X> operator()(const X& grad, const X& x) const {
    const Pair<X> p = passed(grad, x);
    return {p.first, p.first * p.second};
  }
};

template <bool kRelu, typename C, typename T>
struct Gradient {
  Passed<kRelu, C, T> passed;
  InputGradient<C> gradient;
  APEXFX_HD Gradient(const Constants<T>& of, int64_t channel)
      : passed(of, channel),
        gradient{load<C>(of.per_grad + channel), load<C>(of.per_x + channel), load<C>(of.constant + channel)} {}
  template <typename X>
  APEXFX_HD X operator()(const X& grad, const X& x) const {
    const Pair<X> p = passed(grad, x);
    return gradient(p.first, p.second);
  }
};

}  // namespace batch_norm
}  // namespace apexfx
