// See norm_rows.h. Elementwise loops are vectorized as they stand. A sum keeps kLanes running sums in an array, which
// the compiler keeps in vector registers without being allowed to reassociate anything; every kSpan columns they are
// added up pairwise into a double, so that wide rows lose nothing.
#include "norm_rows.h"

#include "lanes.h"

namespace apexfx {
namespace norm {
namespace {

constexpr int64_t kLanes = 64;
constexpr int64_t kSpan = 4096;

template <typename E, typename T>
APEXFX_HD double sum_loop(const E* __restrict__ x, T, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += value(x[i + l]);
    for (int64_t l = 0; i + l < end; ++l) lanes[l] += value(x[i + l]);
    total += add_lanes<kLanes>(lanes);
  }
  return total;
}

template <typename T>
APEXFX_HD T squared(T x) {
  return x * x;
}

template <typename E, typename T>
APEXFX_HD double squares_loop(const E* __restrict__ x, T mean, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += squared(value(x[i + l]) - mean);
    for (int64_t l = 0; i + l < end; ++l) lanes[l] += squared(value(x[i + l]) - mean);
    total += add_lanes<kLanes>(lanes);
  }
  return total;
}

template <typename E, typename T>
APEXFX_HD void sums_loop(const RowGradient<E, T>& row, double* out) {
  const E* __restrict__ grad = row.grad;
  const E* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  double total_g = 0, total_gh = 0;
  for (int64_t begin = 0; begin < row.n; begin += kSpan) {
    const int64_t end = row.n < begin + kSpan ? row.n : begin + kSpan;
    T lanes_g[kLanes] = {}, lanes_gh[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T g = value(grad[i + l]) * weight[i + l];
        lanes_g[l] += g;
        lanes_gh[l] += g * normalized(value(x[i + l]), shift, scale);
      }
    for (int64_t l = 0; i + l < end; ++l) {
      const T g = value(grad[i + l]) * weight[i + l];
      lanes_g[l] += g;
      lanes_gh[l] += g * normalized(value(x[i + l]), shift, scale);
    }
    total_g += add_lanes<kLanes>(lanes_g);
    total_gh += add_lanes<kLanes>(lanes_gh);
  }
  out[0] = total_g;
  out[1] = total_gh;
}

template <typename E, typename T>
APEXFX_HD void normalize_loop(const E* __restrict__ x, T mean, T rstd, const T* __restrict__ weight,
                              const T* __restrict__ bias, E* __restrict__ y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) assign(y[i], affine(normalized(value(x[i]), mean, rstd), weight[i], bias[i]));
}

template <typename E, typename T>
APEXFX_HD void input_gradient_loop(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* __restrict__ dx) {
  const E* __restrict__ grad = row.grad;
  const E* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  for (int64_t i = 0; i < row.n; ++i) {
    const T h = normalized(value(x[i]), shift, scale);
    const T gradient = input_gradient(value(grad[i]) * weight[i], h, mean_g, mean_gh, rstd);
    assign(dx[i], gradient);
  }
}

template <typename E, typename T>
APEXFX_HD void gradients_loop(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* __restrict__ dx,
                              T* __restrict__ dweight, T* __restrict__ dbias) {
  const E* __restrict__ grad = row.grad;
  const E* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  for (int64_t i = 0; i < row.n; ++i) {
    const T h = normalized(value(x[i]), shift, scale), dy = value(grad[i]);
    const T gradient = input_gradient(dy * weight[i], h, mean_g, mean_gh, rstd);
    assign(dx[i], gradient);
    dweight[i] += dy * h;
    dbias[i] += dy;
  }
}

template <typename T>
APEXFX_HD void recover_loop(const T* __restrict__ y, const T* __restrict__ weight, const T* __restrict__ bias, T eps,
                            T* __restrict__ h, int64_t n) {
  for (int64_t i = 0; i < n; ++i) h[i] = recovered(y[i], weight[i], bias[i], eps);
}

template <typename T>
APEXFX_HD void add_loop(const T* __restrict__ in, T* __restrict__ total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += in[i];
}

}  // namespace

// target_clones applies to plain functions only: one set for each pair of types.
#define APEXFX_NORM_ROWS(E, T)                                                                                     \
  APEXFX_CLONES double sum(const E* x, int64_t n) { return sum_loop(x, T(0), n); }                                 \
  APEXFX_CLONES double sum_of_squares(const E* x, T mean, int64_t n) { return squares_loop(x, mean, n); }          \
  APEXFX_CLONES void normalize(const E* x, T mean, T rstd, const T* w, const T* b, E* y, int64_t n) {              \
    normalize_loop(x, mean, rstd, w, b, y, n);                                                                     \
  }                                                                                                                \
  APEXFX_CLONES void gradient_sums(const RowGradient<E, T>& row, double* out) { sums_loop(row, out); }             \
  APEXFX_CLONES void input_gradient_row(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* dx) {        \
    input_gradient_loop(row, mean_g, mean_gh, rstd, dx);                                                           \
  }                                                                                                                \
  APEXFX_CLONES void gradients_row(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* dx, T* dw, T* db) {\
    gradients_loop(row, mean_g, mean_gh, rstd, dx, dw, db);                                                        \
  }

APEXFX_NORM_ROWS(float, float)
APEXFX_NORM_ROWS(double, double)
APEXFX_NORM_ROWS(BFloat16, float)

APEXFX_CLONES void recover(const float* y, const float* w, const float* b, float eps, float* h, int64_t n) {
  recover_loop(y, w, b, eps, h, n);
}
APEXFX_CLONES void recover(const double* y, const double* w, const double* b, double eps, double* h, int64_t n) {
  recover_loop(y, w, b, eps, h, n);
}
APEXFX_CLONES void add(const float* in, float* total, int64_t n) { add_loop(in, total, n); }
APEXFX_CLONES void add(const double* in, double* total, int64_t n) { add_loop(in, total, n); }

}  // namespace norm
}  // namespace apexfx
