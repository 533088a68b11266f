// See batch_norm_loops.h. Elementwise loops are vectorized as they stand. Sums keep kLanes running sums in an array, which
// the compiler keeps in vector registers without being allowed to reassociate anything.
#include "batch_norm_loops.h"

#include <cmath>

#include "lanes.h"

namespace apexfx {
namespace batch_norm {
namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kSpan = 4096;  // elements of a row that are added up in T before they go into a double
constexpr int64_t kGroup = 8;    // rows whose columns are: more would not fit the ways of a cache

template <typename T>
struct Terms {
  T first, second;
  APEXFX_HD void add_to(T& a, T& b) const { a += first, b += second; }
};

// first[c] and second[c] += the sums of terms(c)(i), where i is an element of channel c. What is left of a row after whole
// groups of kLanes is taken with elements before it, which do not count again.
template <typename T, typename F>
APEXFX_HD void add_terms_of_rows(const Matrix& m, double* __restrict__ first, double* __restrict__ second, F&& terms) {
  for (int64_t c = 0; c < m.rows; ++c) {
    const auto term = terms(c);
    for (int64_t begin = 0; begin < m.width; begin += kSpan) {
      T a[kLanes] = {}, b[kLanes] = {}, few_a = 0, few_b = 0;
      int64_t i = c * m.width + begin;
      const int64_t end = begin + kSpan < m.width ? i + kSpan : (c + 1) * m.width;
      for (; i + kLanes <= end; i += kLanes)
        for (int64_t l = 0; l < kLanes; ++l) term(i + l).add_to(a[l], b[l]);
      if (i < end && m.width >= kLanes) {
        T last_a[kLanes], last_b[kLanes];  // all of them, or the compiler would look at each before it computes any
        for (int64_t l = 0; l < kLanes; ++l) {
          const Terms<T> t = term(end - kLanes + l);
          last_a[l] = t.first, last_b[l] = t.second;
        }
        const int64_t counted = kLanes - (end - i);
        for (int64_t l = 0; l < kLanes; ++l) {
          a[l] += l < counted ? T(0) : last_a[l], b[l] += l < counted ? T(0) : last_b[l];
        }
      } else {
        for (; i < end; ++i) term(i).add_to(few_a, few_b);
      }
      first[c] += add_lanes<kLanes>(a) + few_a, second[c] += add_lanes<kLanes>(b) + few_b;
    }
  }
}

template <typename T, typename F>
APEXFX_HD void add_terms_of_columns(const Matrix& m, double* __restrict__ first, double* __restrict__ second, F&& terms) {
  for (int64_t row = 0; row < m.rows; row += kGroup) {
    const int64_t begin = row * m.width, end = (row + kGroup < m.rows ? row + kGroup : m.rows) * m.width;
    if (m.width < kLanes) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t c = (i - begin) % m.width;
        const Terms<T> t = terms(c)(i);
        first[c] += t.first, second[c] += t.second;
      }
      continue;
    }
    for (int64_t next = 0; next < m.width; next += kLanes) {
      const int64_t c = next + kLanes <= m.width ? next : m.width - kLanes;
      T a[kLanes] = {}, b[kLanes] = {};
      for (int64_t i = begin + c; i < end; i += m.width)
        for (int64_t l = 0; l < kLanes; ++l) terms(c + l)(i + l).add_to(a[l], b[l]);
      for (int64_t l = 0; l < kLanes; ++l) {
        first[c + l] += l < next - c ? T(0) : a[l];
        second[c + l] += l < next - c ? T(0) : b[l];
      }
    }
  }
}

template <typename T, typename F>
APEXFX_HD void add_terms(const Matrix& m, double* first, double* second, F&& terms) {
  m.channels_last ? add_terms_of_columns<T>(m, first, second, terms) : add_terms_of_rows<T>(m, first, second, terms);
}

// out[i] = f(c)(i), where i is an element of channel c. What is left of a row after whole groups of kLanes is taken with
// elements before it, which are computed twice.
template <typename E, typename F>
APEXFX_HD void map(const Matrix& m, E* __restrict__ out, F&& f) {
  if (m.channels_last) {
    for (int64_t row = 0; row < m.rows; ++row)
#pragma GCC ivdep
      for (int64_t c = 0; c < m.width; ++c) assign(out[row * m.width + c], f(c)(row * m.width + c));
    return;
  }
  for (int64_t c = 0; c < m.rows; ++c) {
    const auto of_channel = f(c);
    const auto lanes = [=](int64_t i) APEXFX_INLINE {
#pragma GCC ivdep
      for (int64_t l = 0; l < kLanes; ++l) assign(out[i + l], of_channel(i + l));
    };
    int64_t i = c * m.width;
    const int64_t end = i + m.width;
    for (; i + kLanes <= end; i += kLanes) lanes(i);
    if (i < end && m.width >= kLanes) lanes(end - kLanes);
    else for (; i < end; ++i) assign(out[i], of_channel(i));
  }
}

template <typename E, typename T>
APEXFX_HD void sums_loop(const Matrix& m, const E* __restrict__ x, const T* __restrict__ shifts, double* total,
                         double* of_squares) {
  add_terms<T>(m, total, of_squares, [=](int64_t c) APEXFX_INLINE {
    return [x, shift = shifts[c]](int64_t i) APEXFX_INLINE {
      const T d = value(x[i]) - shift;
      return Terms<T>{d, d * d};
    };
  });
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void normalize_loop(const Matrix& m, const Constants<T>& of, const E* __restrict__ x,
                              const E* __restrict__ residual, E* __restrict__ y) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  const auto finish = [](T y) APEXFX_INLINE { return kRelu ? relu(y) : y; };
  if (residual == nullptr) {
    map(m, y, [=](int64_t c) APEXFX_INLINE {
      const Affine<T> affine{center[c], scale[c], shift[c]};
      return [=](int64_t i) APEXFX_INLINE { return finish(affine(value(x[i]))); };
    });
  } else {
    map(m, y, [=](int64_t c) APEXFX_INLINE {
      const Affine<T> affine{center[c], scale[c], shift[c]};
      return [=](int64_t i) APEXFX_INLINE { return finish(affine(value(x[i])) + value(residual[i])); };
    });
  }
}

// Of one channel: the gradient that passes the ReLU, whose input is computed again from d = x - center.
template <bool kRelu, typename T>
struct Passed {
  T center, scale, shift, zero;
  APEXFX_HD T operator()(T grad, T d) const { return kRelu && d * scale + shift <= zero ? T(0) : grad; }
};

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_sums_loop(const Matrix& m, const Constants<T>& of, const E* __restrict__ grad,
                                  const E* __restrict__ x, double* total, double* centered) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  add_terms<T>(m, total, centered, [=, zero = of.zero](int64_t c) APEXFX_INLINE {
    const Passed<kRelu, T> passed{center[c], scale[c], shift[c], zero};
    return [=](int64_t i) APEXFX_INLINE {
      const T d = value(x[i]) - passed.center, g = passed(value(grad[i]), d);
      return Terms<T>{g, g * d};
    };
  });
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void gradient_loop(const Matrix& m, const Constants<T>& of, const E* __restrict__ grad,
                             const E* __restrict__ x, E* __restrict__ dx) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  const T *__restrict__ per_grad = of.per_grad, *__restrict__ per_x = of.per_x, *__restrict__ constant = of.constant;
  map(m, dx, [=, zero = of.zero](int64_t c) APEXFX_INLINE {
    const Passed<kRelu, T> passed{center[c], scale[c], shift[c], zero};
    const InputGradient<T> gradient{per_grad[c], per_x[c], constant[c]};
    return [=](int64_t i) APEXFX_INLINE {
      const T d = value(x[i]) - passed.center;
      return gradient(passed(value(grad[i]), d), d);
    };
  });
}

}  // namespace

// target_clones applies to plain functions only: one set for each pair of types.
#define APEXFX_BATCH_NORM_LOOPS(E, T)                                                                                  \
  APEXFX_CLONES void add_sums(const Matrix& m, const E* x, const T* shift, double* total, double* of_squares) {        \
    sums_loop(m, x, shift, total, of_squares);                                                                         \
  }                                                                                                                    \
  APEXFX_CLONES void add_gradient_sums(const Matrix& m, const Constants<T>& of, const E* g, const E* x, double* total, \
                                       double* centered) {                                                             \
    of.relu ? gradient_sums_loop<true>(m, of, g, x, total, centered)                                                   \
            : gradient_sums_loop<false>(m, of, g, x, total, centered);                                                 \
  }                                                                                                                    \
  APEXFX_CLONES void normalize_matrix(const Matrix& m, const Constants<T>& of, const E* x, const E* r, E* y) {         \
    of.relu ? normalize_loop<true>(m, of, x, r, y) : normalize_loop<false>(m, of, x, r, y);                            \
  }                                                                                                                    \
  APEXFX_CLONES void gradient_matrix(const Matrix& m, const Constants<T>& of, const E* g, const E* x, E* dx) {         \
    of.relu ? gradient_loop<true>(m, of, g, x, dx) : gradient_loop<false>(m, of, g, x, dx);                            \
  }

APEXFX_BATCH_NORM_LOOPS(float, float)
APEXFX_BATCH_NORM_LOOPS(double, double)
APEXFX_BATCH_NORM_LOOPS(BFloat16, float)
APEXFX_BATCH_NORM_LOOPS(Half, float)

APEXFX_CLONES void channel_moments(double count, const double* __restrict__ total,
                                   const double* __restrict__ of_squares, double eps, double* __restrict__ mean,
                                   double* __restrict__ invstd, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(count, total[c], of_squares[c]);
    mean[c] = m.mean;
    invstd[c] = 1 / std::sqrt(m.var + eps);
  }
}

}  // namespace batch_norm
}  // namespace apexfx
