// Loops over the columns of one row, compiled for AVX-512, AVX2 and plain x86-64 (csrc/cpu/norm_rows.cpp); each sum
// runs over a fixed number of lanes, so that all of them compute the same bits.
//
// E is what memory holds (float, double, or BFloat16, widened and rounded on the way) and T what is computed in: double
// for double, else float. Everything else is converted to float in scratch first.
#pragma once

#include "../norm.h"

namespace apexfx {
namespace norm {

// What a backward row needs: h = (x - shift) * scale, g = dy * weight.
template <typename E, typename T>
struct RowGradient {
  const E* grad;
  const E* x;
  const T* weight;
  T shift, scale;
  int64_t n;
};

// sums: {sum(g), sum(g * h)}. gradients: dx, and dweight += dy * h, dbias += dy.
#define APEXFX_NORM_ROWS(E, T)                                                                                     \
  double sum(const E* x, int64_t n);                                                                               \
  double sum_of_squares(const E* x, T mean, int64_t n); /* of x - mean */                                          \
  void normalize(const E* x, T mean, T rstd, const T* weight, const T* bias, E* y, int64_t n);                     \
  void gradient_sums(const RowGradient<E, T>& row, double* out);                                                   \
  void input_gradient_row(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* dx);                       \
  void gradients_row(const RowGradient<E, T>& row, T mean_g, T mean_gh, T rstd, E* dx, T* dweight, T* dbias);

APEXFX_NORM_ROWS(float, float)
APEXFX_NORM_ROWS(double, double)
APEXFX_NORM_ROWS(BFloat16, float)
#undef APEXFX_NORM_ROWS

// h of the memory-efficient backward.
void recover(const float* y, const float* weight, const float* bias, float eps, float* h, int64_t n);
void recover(const double* y, const double* weight, const double* bias, double eps, double* h, int64_t n);

void add(const float* in, float* total, int64_t n);  // total += in
void add(const double* in, double* total, int64_t n);

}  // namespace norm
}  // namespace apexfx
