// Loops over the columns of one row, compiled for AVX-512, AVX2 and plain x86-64 (csrc/cpu/norm_rows.cpp); each sum
// runs over a fixed number of lanes, so that all of them compute the same bits.
#pragma once

#include "../norm.h"

namespace apexfx {
namespace norm {

// What a backward row needs: h = (x - shift) * scale, g = dy * weight.
template <typename T>
struct RowGradient {
  const T* grad;
  const T* x;
  const T* weight;
  T shift, scale;
  int64_t n;
};

double sum(const float* x, int64_t n);
double sum(const double* x, int64_t n);
double sum_of_squares(const float* x, float mean, int64_t n);  // of x - mean
double sum_of_squares(const double* x, double mean, int64_t n);

void normalize(const float* x, float mean, float rstd, const float* weight, const float* bias, float* y, int64_t n);
void normalize(const double* x, double mean, double rstd, const double* weight, const double* bias, double* y, int64_t n);

void recover(const float* y, const float* weight, const float* bias, float eps, float* h, int64_t n);
void recover(const double* y, const double* weight, const double* bias, double eps, double* h, int64_t n);

// sums = {sum(g), sum(g * h)}
void gradient_sums(const RowGradient<float>& row, double sums[2]);
void gradient_sums(const RowGradient<double>& row, double sums[2]);

void gradient_row(const RowGradient<float>& row, float mean_g, float mean_gh, float rstd, float* dx);
void gradient_row(const RowGradient<double>& row, double mean_g, double mean_gh, double rstd, double* dx);

// The same, and dweight += dy * h, dbias += dy.
void gradient_row(const RowGradient<float>& row, float mean_g, float mean_gh, float rstd, float* dx, float* dweight,
                  float* dbias);
void gradient_row(const RowGradient<double>& row, double mean_g, double mean_gh, double rstd, double* dx,
                  double* dweight, double* dbias);

void add(const float* in, float* total, int64_t n);  // total += in
void add(const double* in, double* total, int64_t n);

}  // namespace norm
}  // namespace apexfx
