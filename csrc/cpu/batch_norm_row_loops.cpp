// The loops over rows, and those over vectors of channels: see batch_norm_loops.h.
#include "batch_norm_vectors.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <bool kRelu, typename T>
APEXFX_HD T finish(T y) {
  return kRelu ? relu(y) : y;
}

// The gradient that passes the ReLU, whose input is computed again from x - center.
template <bool kRelu, typename T>
APEXFX_HD T masked(T grad, T centered, T scale, T shift, T zero) {
  return kRelu && centered * scale + shift <= zero ? T(0) : grad;
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
APEXFX_HD void sums_loop(const E* __restrict__ x, const T* __restrict__ shift, T* __restrict__ total,
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
APEXFX_HD void normalize_loop(const Constants<T>& of, const E* __restrict__ x, const E* __restrict__ residual,
                                  E* __restrict__ y, int64_t width, int64_t n) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  for (int64_t begin = 0; begin < n; begin += width) {
    const int64_t count = n - begin < width ? n - begin : width;
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
APEXFX_HD void gradient_sums_loop(const Constants<T>& of, const E* __restrict__ grad, const E* __restrict__ x,
                                      T* __restrict__ total, T* __restrict__ products, int64_t width, int64_t n) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  const T zero = of.zero;
  add_rows<T>(
      width, n, total, products,
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
APEXFX_HD void gradient_loop(const Constants<T>& of, const E* __restrict__ grad, const E* __restrict__ x,
                                 E* __restrict__ dx, int64_t width, int64_t n) {
  const T *__restrict__ center = of.center, *__restrict__ scale = of.scale, *__restrict__ shift = of.shift;
  const T *__restrict__ per_grad = of.per_grad, *__restrict__ per_x = of.per_x;
  const T* __restrict__ constant = of.constant;
  const T zero = of.zero;
  for (int64_t begin = 0; begin < n; begin += width) {
    const int64_t count = n - begin < width ? n - begin : width;
    for (int64_t j = 0; j < count; ++j) {
      const T d = value(x[begin + j]) - center[j];
      const T g = masked<kRelu>(value(grad[begin + j]), d, scale[j], shift[j], zero);
      assign(dx[begin + j], g * per_grad[j] + (d * per_x[j] + constant[j]));
    }
  }
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
