// Sums of squares and maxima over blocks, and their combination over chunks in a fixed order: the result is the same
// for any number of threads.
#pragma once

#include "multi_tensor_loop.h"

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
  explicit PartialSums(const MultiTensorLoop& loop, bool maximum = false)
      : chunks_(loop.chunks()), maximum_(maximum), partials_(chunks_.size(), 0.0) {}

  void add(const Chunk& chunk, double value) {
    double& partial = partials_[chunk.index];
    partial = combine(partial, value);
  }

  std::vector<double> per_tensor() const {
    std::vector<double> totals(chunks_.tensors(), 0.0);
    for (int64_t t = 0; t < chunks_.tensors(); ++t)
      for (int64_t i = chunks_.first_of(t); i < chunks_.first_of(t + 1); ++i)
        totals[t] = combine(totals[t], partials_[i]);
    return totals;
  }

 private:
  double combine(double a, double b) const {
    if (!maximum_) return a + b;
    return a != a || a > b ? a : b;  // NaN wins
  }

  const Chunks& chunks_;
  bool maximum_;
  std::vector<double> partials_;
};

}  // namespace apexfx
