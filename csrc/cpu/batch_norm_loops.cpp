// See batch_norm_loops.h. Sums of a plane are kept in vectors of 64 bytes, which the compiler breaks up for machines
// with narrower ones (loops over arrays of lanes were unrolled into scalars for planes of 7 x 7); every kSpan elements
// they are added up, pairwise, into a double. Sums of x are taken of x minus the first element, so that a mean far from
// 0 costs no digits.
#include "batch_norm_loops.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace apexfx {
namespace batch_norm {
namespace {

constexpr int64_t kSpan = 4096;

APEXFX_HD float value(float x) { return x; }
APEXFX_HD double value(double x) { return x; }
APEXFX_HD float value(Bf16 x) { return bfloat16_to_float(x.bits); }
APEXFX_HD void assign(float& out, float x) { out = x; }
APEXFX_HD void assign(double& out, double x) { out = x; }
APEXFX_HD void assign(Bf16& out, float x) { out.bits = float_to_bfloat16(x); }

template <typename T, int64_t N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int64_t N = 64 / sizeof(T)>
using Vector = typename VectorOf<T, N>::type;

template <typename T>
constexpr int64_t kLanes = 64 / sizeof(T);

template <typename T>
APEXFX_HD Vector<T> load_vector(const T* x) {
  Vector<T> v;
  memcpy(&v, x, sizeof(v));
  return v;
}
APEXFX_HD Vector<float> load_vector(const Bf16* x) {
  Vector<uint16_t, 16> bits;
  memcpy(&bits, x, sizeof(bits));
  const auto wide = __builtin_convertvector(bits, Vector<uint32_t>) << 16;
  Vector<float> v;
  memcpy(&v, &wide, sizeof(v));
  return v;
}

template <int64_t N, typename T>
APEXFX_HD double add_lanes(const Vector<T, N>& v) {
  if constexpr (N == 2) {
    return static_cast<double>(v[0]) + static_cast<double>(v[1]);
  } else {
    Vector<T, N / 2> half[2];
    memcpy(half, &v, sizeof(v));
    return add_lanes<N / 2, T>(half[0] + half[1]);
  }
}

// out += the two sums over [0, n) that `at_vector(i, sum, sum)` adds a whole vector to, and `at` one element.
template <typename T, typename F, typename G>
APEXFX_HD void add_pairs(int64_t n, double* out, F&& at_vector, G&& at) {
  constexpr int64_t lanes = kLanes<T>;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    Vector<T> first[4] = {}, second[4] = {};
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes)
      for (int k = 0; k < 4; ++k) at_vector(i + k * lanes, first[k], second[k]);
    for (; i + lanes <= end; i += lanes) at_vector(i, first[0], second[0]);
    T rest[2] = {};
    for (; i < end; ++i) at(i, rest[0], rest[1]);
    out[0] += add_lanes<lanes, T>((first[0] + first[1]) + (first[2] + first[3])) + static_cast<double>(rest[0]);
    out[1] += add_lanes<lanes, T>((second[0] + second[1]) + (second[2] + second[3])) + static_cast<double>(rest[1]);
  }
}

template <typename T, typename E>
APEXFX_HD void shifted_sums(const E* __restrict__ x, int64_t n, T shift, double* out) {
  add_pairs<T>(
      n, out,
      [&](int64_t i, Vector<T>& total, Vector<T>& of_squares) __attribute__((always_inline)) {
        const Vector<T> d = load_vector(x + i) - shift;
        total += d;
        of_squares += d * d;
      },
      [&](int64_t i, T& total, T& of_squares) __attribute__((always_inline)) {
        const T d = value(x[i]) - shift;
        total += d;
        of_squares += d * d;
      });
}

template <typename T, typename E>
APEXFX_HD void plane_sums_loop(const E* __restrict__ x, int64_t n, double* out) {
  const double count = static_cast<double>(n);
  T shift = value(x[0]);
  double sums[2] = {0, 0};
  shifted_sums(x, n, shift, sums);
  if (is_far(count, sums[0], sums[1])) {
    shift += static_cast<T>(sums[0] / count);
    sums[0] = sums[1] = 0;
    shifted_sums(x, n, shift, sums);
  }
  const Sums all = unshifted(count, static_cast<double>(shift), sums[0], sums[1]);
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
  add_pairs<T>(
      n, out,
      [&](int64_t i, Vector<T>& total, Vector<T>& products) __attribute__((always_inline)) {
        const Vector<T> d = load_vector(x + i) - center;
        Vector<T> g = load_vector(grad + i);
        if constexpr (kRelu) g = d * scale + shift <= zero ? Vector<T>{} : g;
        total += g;
        products += g * d;
      },
      [&](int64_t i, T& total, T& products) __attribute__((always_inline)) {
        const T d = value(x[i]) - center, g = masked<kRelu>(value(grad[i]), d, scale, shift, zero);
        total += g;
        products += g * d;
      });
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

// Adds kTile rows at a time to the running sums of a few columns, which stay in registers for as long; `at_vector(i, j,
// sum, sum)` adds the elements from i, of columns from j, and `at` one.
template <typename T, typename F, typename G>
APEXFX_HD void add_rows(int64_t width, int64_t n, T* first, T* second, F&& at_vector, G&& at) {
  constexpr int64_t lanes = kLanes<T>, kTile = 8, kColumns = 2;
  for (int64_t begin = 0; begin < n; begin += kTile * width) {
    const int64_t count = n - begin < kTile * width ? n - begin : kTile * width, whole = count / width * width;
    int64_t j = 0;
    for (; j + kColumns * lanes <= width; j += kColumns * lanes) {
      Vector<T> sums[kColumns], products[kColumns];
      memcpy(sums, first + j, sizeof(sums));
      memcpy(products, second + j, sizeof(products));
      for (int64_t row = 0; row < whole; row += width)
        for (int64_t k = 0; k < kColumns; ++k)
          at_vector(begin + row + j + k * lanes, j + k * lanes, sums[k], products[k]);
      memcpy(first + j, sums, sizeof(sums));
      memcpy(second + j, products, sizeof(products));
    }
    for (int64_t row = 0; row < whole; row += width)
      for (int64_t c = j; c < width; ++c) at(begin + row + c, c, first[c], second[c]);
    for (int64_t c = 0; whole + c < count; ++c) at(begin + whole + c, c, first[c], second[c]);
  }
}

template <typename E, typename T>
APEXFX_HD void row_sums_loop(const E* __restrict__ x, const T* __restrict__ shift, T* __restrict__ total,
                             T* __restrict__ of_squares, int64_t width, int64_t n) {
  add_rows<T>(
      width, n, total, of_squares,
      [&](int64_t i, int64_t j, Vector<T>& sum, Vector<T>& squares) __attribute__((always_inline)) {
        const Vector<T> d = load_vector(x + i) - load_vector(shift + j);
        sum += d;
        squares += d * d;
      },
      [&](int64_t i, int64_t j, T& sum, T& squares) __attribute__((always_inline)) {
        const T d = value(x[i]) - shift[j];
        sum += d;
        squares += d * d;
      });
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
      for (int64_t j = 0; j < count; ++j)
        assign(out[j], finish<kRelu>((value(in[j]) - center[j]) * scale[j] + shift[j]));
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
  add_rows<T>(
      rows.width, n, total, products,
      [&](int64_t i, int64_t j, Vector<T>& sum, Vector<T>& product) __attribute__((always_inline)) {
        const Vector<T> d = load_vector(x + i) - load_vector(center + j);
        Vector<T> g = load_vector(grad + i);
        if constexpr (kRelu) g = d * load_vector(scale + j) + load_vector(shift + j) <= zero ? Vector<T>{} : g;
        sum += g;
        product += g * d;
      },
      [&](int64_t i, int64_t j, T& sum, T& product) __attribute__((always_inline)) {
        const T d = value(x[i]) - center[j], g = masked<kRelu>(value(grad[i]), d, scale[j], shift[j], zero);
        sum += g;
        product += g * d;
      });
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
      const T d = value(x[begin + j]) - center[j];
      const T g = masked<kRelu>(value(grad[begin + j]), d, scale[j], shift[j], zero);
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
