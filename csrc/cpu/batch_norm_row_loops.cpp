// The loops over rows: see batch_norm_loops.h. A few rows are walked side by side, so that what belongs to their
// columns, constants or running sums, is read once for all of them; more rows would not fit the ways of a cache, since
// those of a power of two of channels share a set.
#include "batch_norm_formulas.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <typename V>
struct As {
  using type = V;
};

// Calls f(As<V>, column, offset of its first element, rows) for `columns`, as many at a time as V holds.
template <typename T, typename F>
APEXFX_HD void for_columns(int64_t begin, int64_t columns, int64_t rows, F&& f) {
  constexpr int64_t lanes = kLanes<T>, quarter = lanes / 4;
  int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) f(As<Vector<T>>{}, j, begin + j, rows);
  for (; j + quarter <= columns; j += quarter) f(As<Vector<T, quarter>>{}, j, begin + j, rows);
  for (; j < columns; ++j) f(As<T>{}, j, begin + j, rows);
}

// The same for n elements, `width` a row, kRows rows at a time; the last row may be a part of one.
template <typename T, int64_t kRows, typename F>
APEXFX_HD void for_rows(int64_t width, int64_t n, F&& f) {
  int64_t at = 0;
  for (; at + kRows * width <= n; at += kRows * width) for_columns<T>(at, width, kRows, f);
  const int64_t rows = (n - at) / width;
  if (rows > 0) for_columns<T>(at, width, rows, f);
  at += rows * width;
  if (at < n) for_columns<T>(at, n - at, 1, f);
}

// first[j], second[j] += the terms of column j, whose functor is terms(As<V>, j) and takes the elements of `in`.
template <int64_t kRows, typename T, typename F, typename... In>
APEXFX_HD void add_rows(int64_t width, int64_t n, T* __restrict__ first, T* __restrict__ second, F&& terms,
                        const In* __restrict__... in) {
  for_rows<T, kRows>(width, n, [&](auto as, int64_t j, int64_t at, int64_t rows) __attribute__((always_inline)) {
    using V = typename decltype(as)::type;
    const auto f = terms(as, j);
    Pair<V> sums{load<V>(first + j), load<V>(second + j)};
    for (int64_t row = 0; row < rows; ++row) sums += f(load<V>(in + at + row * width)...);
    store(first + j, sums.first);
    store(second + j, sums.second);
  });
}

// out[i] = f(in[i]...), where f = functor(As<V>, column).
template <int64_t kRows, typename T, typename E, typename F, typename... In>
APEXFX_HD void map_rows(int64_t width, int64_t n, E* __restrict__ out, F&& functor, const In* __restrict__... in) {
  for_rows<T, kRows>(width, n, [&](auto as, int64_t j, int64_t at, int64_t rows) __attribute__((always_inline)) {
    using V = typename decltype(as)::type;
    const auto f = functor(as, j);
    for (int64_t row = 0; row < rows; ++row) store(out + at + row * width, f(load<V>(in + at + row * width)...));
  });
}

template <typename E, typename T>
APEXFX_HD void sums_loop(const E* x, const T* shift, T* total, T* of_squares, int64_t width, int64_t n) {
  const auto terms = [=](auto as, int64_t j) __attribute__((always_inline)) {
    using V = typename decltype(as)::type;
    return ShiftedTerms<V>{load<V>(shift + j)};
  };
  add_rows<8>(width, n, total, of_squares, terms, x);
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void normalize_loop(const Constants<T>& of, const E* x, const E* residual, E* y, int64_t width, int64_t n) {
  const auto functor = [&](auto as, int64_t j) __attribute__((always_inline)) {
    return Normalize<kRelu, typename decltype(as)::type, T>(of, j);
  };
  if (residual == nullptr) map_rows<4, T>(width, n, y, functor, x);
  else map_rows<4, T>(width, n, y, functor, x, residual);
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_sums_loop(const Constants<T>& of, const E* grad, const E* x, T* total, T* products,
                                  int64_t width, int64_t n) {
  const auto terms = [&](auto as, int64_t j) __attribute__((always_inline)) {
    return GradientTerms<kRelu, typename decltype(as)::type, T>(of, j);
  };
  add_rows<4>(width, n, total, products, terms, grad, x);
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_loop(const Constants<T>& of, const E* grad, const E* x, E* dx, int64_t width, int64_t n) {
  const auto functor = [&](auto as, int64_t j) __attribute__((always_inline)) {
    return Gradient<kRelu, typename decltype(as)::type, T>(of, j);
  };
  map_rows<2, T>(width, n, dx, functor, grad, x);
}

}  // namespace

#define APEXFX_LOOPS(E, T)                                                                                       \
  APEXFX_CLONES void row_sums(const E* x, const T* shift, T* s, T* q, int64_t width, int64_t n) {                \
    sums_loop(x, shift, s, q, width, n);                                                                         \
  }                                                                                                              \
  APEXFX_CLONES void row_normalize(const Constants<T>& of, const E* x, const E* r, E* y, int64_t w, int64_t n) { \
    of.relu ? normalize_loop<true>(of, x, r, y, w, n) : normalize_loop<false>(of, x, r, y, w, n);                \
  }                                                                                                              \
  APEXFX_CLONES void row_gradient_sums(const Constants<T>& of, const E* g, const E* x, T* s, T* q, int64_t w,    \
                                       int64_t n) {                                                              \
    of.relu ? gradient_sums_loop<true>(of, g, x, s, q, w, n) : gradient_sums_loop<false>(of, g, x, s, q, w, n);  \
  }                                                                                                              \
  APEXFX_CLONES void row_gradient(const Constants<T>& of, const E* g, const E* x, E* dx, int64_t w, int64_t n) { \
    of.relu ? gradient_loop<true>(of, g, x, dx, w, n) : gradient_loop<false>(of, g, x, dx, w, n);                \
  }

APEXFX_LOOPS(float, float)
APEXFX_LOOPS(double, double)
APEXFX_LOOPS(Bf16, float)

}  // namespace batch_norm
}  // namespace apexfx
