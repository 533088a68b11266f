// y: [rows, n], and each row's mean (layer norm) and rstd.
#pragma once

#include "norm_row.cuh"

namespace apexfx {
namespace norm {

template <typename X, typename W, typename Y>
struct ForwardArguments {
  const X* x;
  const W* weight;
  const W* bias;
  Y* y;
  Compute<X>* mean;  // null for RMS norm
  Compute<X>* rstd;
  int64_t rows, n;
  Compute<X> eps;
};

template <typename X, typename W, typename Y, int kPack, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) forward_kernel(const ForwardArguments<X, W, Y> a) {
  using A = Compute<X>;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kPack, first = static_cast<int64_t>(threadIdx.x) * kPack;
  A kept[kPacks ? kPacks : 1][kPack];
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < a.rows;
       base += static_cast<int64_t>(gridDim.x) * blockDim.y) {  // the same number of turns for the whole block
    const int64_t row = base + threadIdx.y, n = row < a.rows ? a.n : 0;
    const X* x = a.x + row * a.n;
    Y* y = a.y + row * a.n;
    Moments<A> moments{0, 0, 0};
    if constexpr (kPacks > 0) {
      int count = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        if (first + p * step < n) {
          load_pack(x + first + p * step, kept[p]);
          count = p + 1;
        }
      moments = moments_of(kept, count, a.mean != nullptr);
    } else {
      for (int64_t column = first; column < n; column += step) {
        load_pack(x + column, kept[0]);
        moments = merged(moments, moments_of(kept, 1, a.mean != nullptr));
      }
    }
    moments = merged_over_row(moments);
    const A mean = moments.mean, rstd = rsqrt(moments.m2 / static_cast<A>(a.n) + a.eps);
    const auto give = [&](A(&values)[kPack], int64_t column) {
      A weight[kPack], bias[kPack];
      load_parameter(a.weight, column, A(1), weight);
      load_parameter(a.bias, column, A(0), bias);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = affine(normalized(values[i], mean, rstd), weight[i], bias[i]);
      store_pack(y + column, values);
    };
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        if (first + p * step < n) give(kept[p], first + p * step);
    } else {
      for (int64_t column = first; column < n; column += step) {
        load_pack(x + column, kept[0]);
        give(kept[0], column);
      }
    }
    if (threadIdx.x == 0 && n) {
      if (a.mean) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

}  // namespace norm
}  // namespace apexfx
