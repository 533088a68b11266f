// dx: [rows, n], and the sums over the rows that weight and bias are given.
//
// The parameters' gradients are summed by the thread that owns the column over the rows of its block, then over the
// blocks in order: the same result in every run.
#pragma once

#include "norm_row.cuh"

namespace apexfx {
namespace norm {

template <typename G, typename S, typename D, typename W>
struct BackwardArguments {
  using A = Compute<S>;
  const G* grad;
  const S* saved;  // x, or y where from_output
  const A* mean;   // null for RMS norm, and where from_output
  const A* rstd;
  const W* weight;
  const W* bias;
  D* dx;
  A* partial;  // [blocks, 2, n]: the sums for weight and bias; null where they are not wanted
  int64_t rows, n;
  A eps;
  bool centered, from_output;
};

// h of a pack of `saved`.
template <int N, typename A>
__device__ __forceinline__ void to_normalized(A (&h)[N], const A (&weight)[N], const A (&bias)[N], A mean, A rstd,
                                              A eps, bool from_output) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    h[i] = from_output ? recovered(h[i], weight[i], bias[i], eps) : normalized(h[i], mean, rstd);
}

// One pack's inputs: dy, h and g = dy * weight.
template <typename Arguments, int N, typename A>
__device__ __forceinline__ void load_gradient(const Arguments& a, int64_t row, int64_t column, A mean, A rstd,
                                              A (&dy)[N], A (&h)[N], A (&weight)[N]) {
  A bias[N];
  load_pack(a.grad + row * a.n + column, dy);
  load_pack(a.saved + row * a.n + column, h);
  load_parameter(a.weight, column, A(1), weight);
  load_parameter(a.from_output ? a.bias : nullptr, column, A(0), bias);
  to_normalized(h, weight, bias, mean, rstd, a.eps, a.from_output);
}

constexpr int kBlockThreads = 256;                // unless a single row takes more
constexpr int kSharedThreads = kBlockThreads / 2;  // of a row, at most, where a block has several

template <typename G, typename S, typename D, typename W, int kPack, int kPacks, bool kParameters>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  static_assert(!kParameters || kPacks > 0, "the parameters' sums live in the registers of a kept row");
  const int64_t step = static_cast<int64_t>(blockDim.x) * kPack, first = static_cast<int64_t>(threadIdx.x) * kPack;
  constexpr int kKept = kPacks ? kPacks : 1, kSums = kParameters ? kPacks : 1;
  A dweight[kSums][kPack] = {}, dbias[kSums][kPack] = {};
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < a.rows;
       base += static_cast<int64_t>(gridDim.x) * blockDim.y) {  // the same number of turns for the whole block
    const int64_t row = base + threadIdx.y, n = row < a.rows ? a.n : 0;
    const A mean = a.mean && n ? a.mean[row] : A(0), rstd = n ? a.rstd[row] : A(0);
    D* dx = a.dx + row * a.n;
    A g[kKept][kPack], h[kKept][kPack], weight[kPack];
    Pair<A> sums{0, 0};
    const auto take = [&](A(&g_pack)[kPack], const A(&h_pack)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        g_pack[i] *= weight[i];
        sums.first += g_pack[i];
        sums.second += g_pack[i] * h_pack[i];
      }
    };
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (first + p * step >= n) continue;
        load_gradient(a, row, first + p * step, mean, rstd, g[p], h[p], weight);
        if constexpr (kParameters) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            dweight[p][i] += g[p][i] * h[p][i];
            dbias[p][i] += g[p][i];
          }
        }
        take(g[p], h[p]);
      }
    } else {
      for (int64_t column = first; column < n; column += step) {
        load_gradient(a, row, column, mean, rstd, g[0], h[0], weight);
        take(g[0], h[0]);
      }
    }
    sums = merged_over_row(sums);
    const A columns = static_cast<A>(a.n);
    const A mean_g = a.centered ? sums.first / columns : A(0), mean_gh = sums.second / columns;
    const auto give = [&](A(&g_pack)[kPack], const A(&h_pack)[kPack], int64_t column) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g_pack[i] = input_gradient(g_pack[i], h_pack[i], mean_g, mean_gh, rstd);
      store_pack(dx + column, g_pack);
    };
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        if (first + p * step < n) give(g[p], h[p], first + p * step);
    } else {
      for (int64_t column = first; column < n; column += step) {
        load_gradient(a, row, column, mean, rstd, g[0], h[0], weight);
#pragma unroll
        for (int i = 0; i < kPack; ++i) g[0][i] *= weight[i];
        give(g[0], h[0], column);
      }
    }
  }
  if constexpr (kParameters) {
    // What the threads of one column summed over their rows is added up in the order of threadIdx.y.
    __shared__ A shared[2][kPacks * kPack][kSharedThreads];
    A* out = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.n;
    const auto add_up = [&](A(&sums)[kPacks][kPack], A(&shared)[kPacks * kPack][kSharedThreads], A* out) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (threadIdx.y > 0) sums[p][i] += shared[p * kPack + i][threadIdx.x];
          if (threadIdx.y + 1 < blockDim.y) shared[p * kPack + i][threadIdx.x] = sums[p][i];
        }
        if (threadIdx.y + 1 == blockDim.y && first + p * step < a.n) store_pack(out + first + p * step, sums[p]);
      }
    };
    for (unsigned y = 0; y < blockDim.y; ++y) {
      if (threadIdx.y == y) {
        add_up(dweight, shared[0], out);
        add_up(dbias, shared[1], out + a.n);
      }
      __syncthreads();
    }
  }
}

// The parameters' sums by themselves, for rows that are not kept: block (x, y) sums 32 columns of its share of the rows.
constexpr int kTileRows = 8;

template <typename G, typename S, typename D, typename W>
__global__ void __launch_bounds__(32 * kTileRows, 1) parameters_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  __shared__ A tile[2][kTileRows][32];
  for (int64_t tile_column = static_cast<int64_t>(blockIdx.x) * 32; tile_column < a.n;
       tile_column += static_cast<int64_t>(gridDim.x) * 32) {
    const int64_t column = tile_column + threadIdx.x;
    A dweight = 0, dbias = 0;
    if (column < a.n)
      for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + threadIdx.y; row < a.rows;
           row += static_cast<int64_t>(gridDim.y) * kTileRows) {
        A dy[1], h[1], weight[1];
        load_gradient(a, row, column, a.mean ? a.mean[row] : A(0), a.rstd[row], dy, h, weight);
        dweight += dy[0] * h[0];
        dbias += dy[0];
      }
    tile[0][threadIdx.y][threadIdx.x] = dweight;
    tile[1][threadIdx.y][threadIdx.x] = dbias;
    __syncthreads();
    if (threadIdx.y < 2 && column < a.n) {
      A sum = 0;
      for (int y = 0; y < kTileRows; ++y) sum += tile[threadIdx.y][y][threadIdx.x];
      a.partial[(static_cast<int64_t>(blockIdx.y) * 2 + threadIdx.y) * a.n + column] = sum;
    }
    __syncthreads();
  }
}

// The second stage: the sum over the blocks, in order, of 32 columns.
template <typename A, typename P>
__global__ void __launch_bounds__(32 * kTileRows, 1)
    finish_kernel(const A* __restrict__ partial, int64_t parts, int64_t n, P* dweight, P* dbias) {
  __shared__ A tile[kTileRows][32];
  P* out = blockIdx.y ? dbias : dweight;
  if (!out) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  A sum = 0;
  if (column < n)
    for (int64_t part = threadIdx.y; part < parts; part += kTileRows) sum += partial[(part * 2 + blockIdx.y) * n + column];
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < n) {
    for (int y = 1; y < kTileRows; ++y) sum += tile[y][threadIdx.x];
    out[column] = static_cast<P>(sum);
  }
}

}  // namespace norm
}  // namespace apexfx
