// See batch_norm_loops.h. A sum keeps kLanes running sums in an array, which the compiler holds in vector registers
// without reassociating anything; every kSpan elements they are added up into a double. Sums of x are taken of x minus
// the first element, so that a mean far from 0 costs no digits.
#include "batch_norm_loops.h"

namespace apexfx {
namespace batch_norm {
namespace {

constexpr int64_t kLanes = 64;
constexpr int64_t kSpan = 4096;

APEXFX_HD float value(float x) { return x; }
APEXFX_HD double value(double x) { return x; }
APEXFX_HD float value(Bf16 x) { return bfloat16_to_float(x.bits); }
APEXFX_HD void assign(float& out, float x) { out = x; }
APEXFX_HD void assign(double& out, double x) { out = x; }
APEXFX_HD void assign(Bf16& out, float x) { out.bits = float_to_bfloat16(x); }

template <typename T, int64_t kCount = kLanes>
APEXFX_HD double add_lanes(const T* lanes) {
  if constexpr (kCount == 1) {
    return static_cast<double>(lanes[0]);
  } else {
    T half[kCount / 2];
    for (int64_t l = 0; l < kCount / 2; ++l) half[l] = lanes[l] + lanes[l + kCount / 2];
    return add_lanes<T, kCount / 2>(half);
  }
}

template <typename T, typename E>
APEXFX_HD void plane_sums_loop(const E* __restrict__ x, int64_t n, double* out) {
  const T shift = value(x[0]);
  double total = 0, of_squares = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T sums[kLanes] = {}, squares[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T d = value(x[i + l]) - shift;
        sums[l] += d;
        squares[l] += d * d;
      }
    for (int64_t l = 0; i + l < end; ++l) {
      const T d = value(x[i + l]) - shift;
      sums[l] += d;
      squares[l] += d * d;
    }
    total += add_lanes(sums);
    of_squares += add_lanes(squares);
  }
  const Sums all = unshifted(static_cast<double>(n), static_cast<double>(shift), total, of_squares);
  out[0] += all.total;
  out[1] += all.of_squares;
}

template <bool kRelu, typename T>
APEXFX_HD T finish(T y) {
  return kRelu ? relu(y) : y;
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void plane_normalize_loop(Affine<T> affine, const E* __restrict__ x, const E* __restrict__ residual,
                                    E* __restrict__ y, int64_t n) {
  if (residual == nullptr)
    for (int64_t i = 0; i < n; ++i) assign(y[i], finish<kRelu>(affine(value(x[i]))));
  else
    for (int64_t i = 0; i < n; ++i) assign(y[i], finish<kRelu>(affine(value(x[i])) + value(residual[i])));
}

// The gradient that passes the ReLU, whose input is computed again from x - center.
template <bool kRelu, typename T>
APEXFX_HD T masked(T grad, T centered, T scale, T shift, T zero) {
  return kRelu && centered * scale + shift <= zero ? T(0) : grad;
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void plane_gradient_sums_loop(const Plane<T>& plane, const E* __restrict__ grad, const E* __restrict__ x,
                                        int64_t n, double* out) {
  const T center = plane.affine.center, scale = plane.affine.scale, shift = plane.affine.shift, zero = plane.zero;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T sums[kLanes] = {}, products[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T d = value(x[i + l]) - center, g = masked<kRelu>(value(grad[i + l]), d, scale, shift, zero);
        sums[l] += g;
        products[l] += g * d;
      }
    for (int64_t l = 0; i + l < end; ++l) {
      const T d = value(x[i + l]) - center, g = masked<kRelu>(value(grad[i + l]), d, scale, shift, zero);
      sums[l] += g;
      products[l] += g * d;
    }
    out[0] += add_lanes(sums);
    out[1] += add_lanes(products);
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void plane_gradient_loop(const Plane<T>& plane, const E* __restrict__ grad, const E* __restrict__ x,
                                   E* __restrict__ dx, int64_t n) {
  const T center = plane.affine.center, scale = plane.affine.scale, shift = plane.affine.shift, zero = plane.zero;
  const InputGradient<T> gradient = plane.gradient;
  for (int64_t i = 0; i < n; ++i) {
    const T d = value(x[i]) - center;
    assign(dx[i], gradient(masked<kRelu>(value(grad[i]), d, scale, shift, zero), d));
  }
}

template <typename E, typename T>
APEXFX_HD void row_sums_loop(const E* __restrict__ x, const T* __restrict__ shift, T* __restrict__ total,
                             T* __restrict__ of_squares, int64_t width, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += width) {
    const int64_t count = n - begin < width ? n - begin : width;
    for (int64_t j = 0; j < count; ++j) {
      const T d = value(x[begin + j]) - shift[j];
      total[j] += d;
      of_squares[j] += d * d;
    }
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void row_normalize_loop(const Rows<T>& rows, const E* __restrict__ x, const E* __restrict__ residual,
                                  E* __restrict__ y, int64_t n) {
  const T *__restrict__ center = rows.center, *__restrict__ scale = rows.scale, *__restrict__ shift = rows.shift;
  for (int64_t begin = 0; begin < n; begin += rows.width) {
    const int64_t count = n - begin < rows.width ? n - begin : rows.width;
    const E* in = x + begin;
    E* out = y + begin;
    if (residual == nullptr)
      for (int64_t j = 0; j < count; ++j) assign(out[j], finish<kRelu>((value(in[j]) - center[j]) * scale[j] + shift[j]));
    else
      for (int64_t j = 0; j < count; ++j)
        assign(out[j], finish<kRelu>((value(in[j]) - center[j]) * scale[j] + shift[j] + value(residual[begin + j])));
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void row_gradient_sums_loop(const Rows<T>& rows, const E* __restrict__ grad, const E* __restrict__ x,
                                      T* __restrict__ total, T* __restrict__ products, int64_t n) {
  const T *__restrict__ center = rows.center, *__restrict__ scale = rows.scale, *__restrict__ shift = rows.shift;
  const T zero = rows.zero;
  for (int64_t begin = 0; begin < n; begin += rows.width) {
    const int64_t count = n - begin < rows.width ? n - begin : rows.width;
    for (int64_t j = 0; j < count; ++j) {
      const T d = value(x[begin + j]) - center[j], g = masked<kRelu>(value(grad[begin + j]), d, scale[j], shift[j], zero);
      total[j] += g;
      products[j] += g * d;
    }
  }
}

template <bool kRelu, typename E, typename T>
APEXFX_HD void row_gradient_loop(const Rows<T>& rows, const E* __restrict__ grad, const E* __restrict__ x,
                                 E* __restrict__ dx, int64_t n) {
  const T *__restrict__ center = rows.center, *__restrict__ scale = rows.scale, *__restrict__ shift = rows.shift;
  const T *__restrict__ per_grad = rows.per_grad, *__restrict__ per_x = rows.per_x;
  const T* __restrict__ constant = rows.constant;
  const T zero = rows.zero;
  for (int64_t begin = 0; begin < n; begin += rows.width) {
    const int64_t count = n - begin < rows.width ? n - begin : rows.width;
    for (int64_t j = 0; j < count; ++j) {
      const T d = value(x[begin + j]) - center[j], g = masked<kRelu>(value(grad[begin + j]), d, scale[j], shift[j], zero);
      assign(dx[begin + j], g * per_grad[j] + (d * per_x[j] + constant[j]));
    }
  }
}

}  // namespace

#define APEXFX_LOOPS(E, T)                                                                                        \
  APEXFX_CLONES void plane_sums(const E* x, int64_t n, double* out) { plane_sums_loop<T>(x, n, out); }            \
  APEXFX_CLONES void plane_normalize(const Plane<T>& p, const E* x, const E* r, E* y, int64_t n) {                \
    p.relu ? plane_normalize_loop<true>(p.affine, x, r, y, n) : plane_normalize_loop<false>(p.affine, x, r, y, n); \
  }                                                                                                               \
  APEXFX_CLONES void plane_gradient_sums(const Plane<T>& p, const E* g, const E* x, int64_t n, double* out) {     \
    p.relu ? plane_gradient_sums_loop<true>(p, g, x, n, out) : plane_gradient_sums_loop<false>(p, g, x, n, out);  \
  }                                                                                                               \
  APEXFX_CLONES void plane_gradient(const Plane<T>& p, const E* g, const E* x, E* dx, int64_t n) {                \
    p.relu ? plane_gradient_loop<true>(p, g, x, dx, n) : plane_gradient_loop<false>(p, g, x, dx, n);              \
  }                                                                                                               \
  APEXFX_CLONES void row_sums(const E* x, const T* shift, T* s, T* q, int64_t width, int64_t n) {                 \
    row_sums_loop(x, shift, s, q, width, n);                                                                      \
  }                                                                                                               \
  APEXFX_CLONES void row_normalize(const Rows<T>& w, const E* x, const E* r, E* y, int64_t n) {                   \
    w.relu ? row_normalize_loop<true>(w, x, r, y, n) : row_normalize_loop<false>(w, x, r, y, n);                  \
  }                                                                                                               \
  APEXFX_CLONES void row_gradient_sums(const Rows<T>& w, const E* g, const E* x, T* s, T* q, int64_t n) {         \
    w.relu ? row_gradient_sums_loop<true>(w, g, x, s, q, n) : row_gradient_sums_loop<false>(w, g, x, s, q, n);    \
  }                                                                                                               \
  APEXFX_CLONES void row_gradient(const Rows<T>& w, const E* g, const E* x, E* dx, int64_t n) {                   \
    w.relu ? row_gradient_loop<true>(w, g, x, dx, n) : row_gradient_loop<false>(w, g, x, dx, n);                  \
  }

APEXFX_LOOPS(float, float)
APEXFX_LOOPS(double, double)
APEXFX_LOOPS(Bf16, float)

}  // namespace batch_norm
}  // namespace apexfx
