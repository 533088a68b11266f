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
__global__ void __launch_bounds__(kMaxThreads, kPack > 1 ? 2 : 1) forward_kernel(const ForwardArguments<X, W, Y> a) {
  using A = Compute<X>;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kPack, first = static_cast<int64_t>(threadIdx.x) * kPack;
  const A columns = static_cast<A>(a.n);
  unsigned turn = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < a.rows;
       base += static_cast<int64_t>(gridDim.x) * blockDim.y) {  // the same number of turns for the whole block
    const int64_t row = base + threadIdx.y, begin = row * a.n, n = row < a.rows ? a.n : 0;
    const X* x = a.x + begin;
    Pack<X, kPack> kept[kPacks ? kPacks : 1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (first + p * step < n) kept[p] = load_pack<kPack>(x + first + p * step);
    // Calls f(values, column) for each pack that the thread owns.
    const auto for_each_pack = [&](auto&& f) {
      A values[kPack];
      if constexpr (kPacks > 0) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (first + p * step >= n) continue;
          widen(kept[p], values);
          f(values, first + p * step);
        }
      } else {
        for (int64_t column = first; column < n; column += step) {
          widen(load_pack<kPack>(x + column), values);
          f(values, column);
        }
      }
    };
    const auto mean_of = [&](auto&& f) {
      A sum[1] = {0};
      for_each_pack([&](A(&values)[kPack], int64_t) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[0] += f(values[i]);
      });
      sum_over_row(sum, turn);
      return sum[0] / columns;
    };
    const A mean = a.mean ? mean_of([](A x) { return x; }) : A(0);
    const A rstd = rsqrt(mean_of([mean](A x) { return (x - mean) * (x - mean); }) + a.eps);
    for_each_pack([&](A(&values)[kPack], int64_t column) {
      A weight[kPack], bias[kPack];
      load_parameter(a.weight, column, A(1), weight);
      load_parameter(a.bias, column, A(0), bias);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = affine(normalized(values[i], mean, rstd), weight[i], bias[i]);
      store_pack(a.y + begin + column, values);
    });
    if (threadIdx.x == 0 && n) {
      if (a.mean) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

}  // namespace norm
}  // namespace apexfx
