// Sums of squares and maxima over blocks, and their combination over chunks in a fixed order: the result is the same
// for any number of threads.
#pragma once

#include "walk.h"

namespace apexfx {

// Sum of squares, accumulated in double (csrc/cpu/sums.cpp).
double square_sum(const float* x, int64_t n);
double square_sum(const double* x, int64_t n);
// Largest magnitude; NaN where there is a NaN.
double max_abs(const float* x, int64_t n);
double max_abs(const double* x, int64_t n);
// True where an element is infinite or NaN.
bool any_non_finite(const float* x, int64_t n);
bool any_non_finite(const double* x, int64_t n);

// One partial result per chunk; chunks are written by one thread each.
class PartialSums {
 public:
  explicit PartialSums(const Walk& walk, bool maximum = false)
      : walk_(walk), maximum_(maximum), partials_(walk.chunks().size(), 0.0) {}

  void add(const Chunk& chunk, double value) {
    double& partial = partials_[&chunk - walk_.chunks().data()];
    partial = combine(partial, value);
  }

  std::vector<double> per_tensor() const {
    std::vector<double> totals(walk_.positions().size(), 0.0);
    for (size_t i = 0; i < partials_.size(); ++i) {
      double& total = totals[walk_.chunks()[i].tensor];
      total = combine(total, partials_[i]);
    }
    return totals;
  }

 private:
  double combine(double a, double b) const {
    if (!maximum_) return a + b;
    return a != a || a > b ? a : b;  // NaN wins
  }

  const Walk& walk_;
  bool maximum_;
  std::vector<double> partials_;
};

}  // namespace apexfx
