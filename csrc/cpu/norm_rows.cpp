// See norm_rows.h. Elementwise loops are vectorized as they stand. A sum keeps kLanes running sums in an array, which
// the compiler turns into vectors without being allowed to reassociate anything; every kSpan columns they are added
// up pairwise into a double, so that wide rows lose nothing.
#include "norm_rows.h"

namespace apexfx {
namespace norm {
namespace {

constexpr int64_t kLanes = 64;
constexpr int64_t kSpan = 4096;

// Pairwise; one array a level, so that no level waits for the one before to reach memory.
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

template <typename T>
APEXFX_HD double sum_loop(const T* __restrict__ x, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += x[i + l];
    for (int64_t l = 0; i + l < end; ++l) lanes[l] += x[i + l];
    total += add_lanes(lanes);
  }
  return total;
}

template <typename T>
APEXFX_HD double squares_loop(const T* __restrict__ x, T mean, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    T lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T d = x[i + l] - mean;
        lanes[l] += d * d;
      }
    for (int64_t l = 0; i + l < end; ++l) {
      const T d = x[i + l] - mean;
      lanes[l] += d * d;
    }
    total += add_lanes(lanes);
  }
  return total;
}

template <typename T>
APEXFX_HD void gradient_sums_loop(const RowGradient<T>& row, double* sums) {
  const T* __restrict__ grad = row.grad;
  const T* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  double total_g = 0, total_gh = 0;
  for (int64_t begin = 0; begin < row.n; begin += kSpan) {
    const int64_t end = row.n < begin + kSpan ? row.n : begin + kSpan;
    T lanes_g[kLanes] = {}, lanes_gh[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T g = grad[i + l] * weight[i + l];
        lanes_g[l] += g;
        lanes_gh[l] += g * normalized(x[i + l], shift, scale);
      }
    for (int64_t l = 0; i + l < end; ++l) {
      const T g = grad[i + l] * weight[i + l];
      lanes_g[l] += g;
      lanes_gh[l] += g * normalized(x[i + l], shift, scale);
    }
    total_g += add_lanes(lanes_g);
    total_gh += add_lanes(lanes_gh);
  }
  sums[0] = total_g;
  sums[1] = total_gh;
}

template <typename T>
APEXFX_HD void normalize_loop(const T* __restrict__ x, T mean, T rstd, const T* __restrict__ weight,
                              const T* __restrict__ bias, T* __restrict__ y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = affine(normalized(x[i], mean, rstd), weight[i], bias[i]);
}

template <typename T>
APEXFX_HD void recover_loop(const T* __restrict__ y, const T* __restrict__ weight, const T* __restrict__ bias, T eps,
                            T* __restrict__ h, int64_t n) {
  for (int64_t i = 0; i < n; ++i) h[i] = recovered(y[i], weight[i], bias[i], eps);
}

template <typename T>
APEXFX_HD void gradient_loop(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* __restrict__ dx) {
  const T* __restrict__ grad = row.grad;
  const T* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  for (int64_t i = 0; i < row.n; ++i)
    dx[i] = input_gradient(grad[i] * weight[i], normalized(x[i], shift, scale), mean_g, mean_gh, rstd);
}

template <typename T>
APEXFX_HD void gradients_loop(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* __restrict__ dx,
                              T* __restrict__ dweight, T* __restrict__ dbias) {
  const T* __restrict__ grad = row.grad;
  const T* __restrict__ x = row.x;
  const T* __restrict__ weight = row.weight;
  const T shift = row.shift, scale = row.scale;
  for (int64_t i = 0; i < row.n; ++i) {
    const T h = normalized(x[i], shift, scale), dy = grad[i];
    dx[i] = input_gradient(dy * weight[i], h, mean_g, mean_gh, rstd);
    dweight[i] += dy * h;
    dbias[i] += dy;
  }
}

template <typename T>
APEXFX_HD void add_loop(const T* __restrict__ in, T* __restrict__ total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += in[i];
}

// target_clones applies to plain functions only: one for each accumulation type.
#define APEXFX_NORM_ROWS(T)                                                                                          \
  APEXFX_CLONES double sum_rows(const T* x, int64_t n) { return sum_loop(x, n); }                                    \
  APEXFX_CLONES double squares_rows(const T* x, T mean, int64_t n) { return squares_loop(x, mean, n); }              \
  APEXFX_CLONES void normalize_rows(const T* x, T mean, T rstd, const T* weight, const T* bias, T* y, int64_t n) {   \
    normalize_loop(x, mean, rstd, weight, bias, y, n);                                                               \
  }                                                                                                                  \
  APEXFX_CLONES void recover_rows(const T* y, const T* weight, const T* bias, T eps, T* h, int64_t n) {              \
    recover_loop(y, weight, bias, eps, h, n);                                                                        \
  }                                                                                                                  \
  APEXFX_CLONES void sums_rows(const RowGradient<T>& row, double* sums) { gradient_sums_loop(row, sums); }           \
  APEXFX_CLONES void gradient_rows(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* dx) {                  \
    gradient_loop(row, mean_g, mean_gh, rstd, dx);                                                                   \
  }                                                                                                                  \
  APEXFX_CLONES void gradients_rows(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* dx, T* dw, T* db) {   \
    gradients_loop(row, mean_g, mean_gh, rstd, dx, dw, db);                                                          \
  }                                                                                                                  \
  APEXFX_CLONES void add_rows(const T* in, T* total, int64_t n) { add_loop(in, total, n); }

APEXFX_NORM_ROWS(float)
APEXFX_NORM_ROWS(double)
#undef APEXFX_NORM_ROWS

}  // namespace

#define APEXFX_NORM_EXPORT(T)                                                                                        \
  double sum(const T* x, int64_t n) { return sum_rows(x, n); }                                                       \
  double sum_of_squares(const T* x, T mean, int64_t n) { return squares_rows(x, mean, n); }                          \
  void normalize(const T* x, T mean, T rstd, const T* weight, const T* bias, T* y, int64_t n) {                      \
    normalize_rows(x, mean, rstd, weight, bias, y, n);                                                               \
  }                                                                                                                  \
  void recover(const T* y, const T* weight, const T* bias, T eps, T* h, int64_t n) {                                 \
    recover_rows(y, weight, bias, eps, h, n);                                                                        \
  }                                                                                                                  \
  void gradient_sums(const RowGradient<T>& row, double sums[2]) { sums_rows(row, sums); }                            \
  void gradient_row(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* dx) {                                 \
    gradient_rows(row, mean_g, mean_gh, rstd, dx);                                                                   \
  }                                                                                                                  \
  void gradient_row(const RowGradient<T>& row, T mean_g, T mean_gh, T rstd, T* dx, T* dweight, T* dbias) {           \
    gradients_rows(row, mean_g, mean_gh, rstd, dx, dweight, dbias);                                                  \
  }                                                                                                                  \
  void add(const T* in, T* total, int64_t n) { add_rows(in, total, n); }

APEXFX_NORM_EXPORT(float)
APEXFX_NORM_EXPORT(double)
#undef APEXFX_NORM_EXPORT

}  // namespace norm
}  // namespace apexfx
