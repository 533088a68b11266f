// dx: [rows, n], and the sums over the rows that weight and bias are given.
//
// The parameters' gradients are summed by the thread that owns the column over the rows of its block, then over the
// blocks in order: the same result in every run.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "norm_row.cuh"

namespace apexfx {
namespace norm {

template <typename G, typename S, typename D, typename W>
struct BackwardArguments {
  using A = Compute<S>;
  const G* grad;
  const S* saved;  // x, or y where the kernel is of the output
  const A* mean;   // null for RMS norm, and of the output
  const A* rstd;
  const W* weight;
  const W* bias;
  D* dx;
  A* partial;  // [blocks, 2, n]: the sums for weight and bias; null where they are not wanted
  int64_t rows, n;
  A eps;
  bool centered;
};

// From dy and the saved value of a pack: h, and the row's weight.
template <bool kFromOutput, typename Arguments, int N, typename A>
__device__ __forceinline__ void to_normalized(const Arguments& a, int64_t column, A mean, A rstd, A (&h)[N],
                                              A (&weight)[N]) {
  load_parameter(a.weight, column, A(1), weight);
  if constexpr (kFromOutput) {
    A bias[N];
    load_parameter(a.bias, column, A(0), bias);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = recovered(h[i], weight[i], bias[i], a.eps);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = normalized(h[i], mean, rstd);
  }
}

template <int N, typename A>
__device__ __forceinline__ void add_to_sums(A (&sums)[2], const A (&g)[N], const A (&h)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sums[0] += g[i];
    sums[1] += g[i] * h[i];
  }
}

// Writes dx of a pack from g = dy * weight and h; `means` are those of g and of g * h.
template <typename Arguments, int N, typename A>
__device__ __forceinline__ void store_gradient(const Arguments& a, int64_t at, A (&g)[N], const A (&h)[N],
                                               const A (&means)[2], A rstd) {
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = input_gradient(g[i], h[i], means[0], means[1], rstd);
  store_pack(a.dx + at, g);
}

constexpr int kSharedThreads = kBlockThreads / 2;  // of a row, at most, where a block has several

// Rows that are kept: while one of x is computed, the next is read.
template <typename G, typename S, typename D, typename W, int kPack, int kPacks, bool kFromOutput, bool kParameters>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  const int n = static_cast<int>(a.n), step = blockDim.x * kPack, first = threadIdx.x * kPack;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  constexpr int kSums = kParameters ? kPacks : 1;
  A dweight[kSums][kPack] = {}, dbias[kSums][kPack] = {};
  unsigned turn = 0;

  Pack<G, kPack> next_grad[kPacks];
  Pack<S, kPack> next_saved[kPacks];
  A next_mean = 0, next_rstd = 0;
  const auto fetch = [&](int64_t row) {
    if (row >= a.rows) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * step >= n) continue;
      next_grad[p] = load_pack<kPack>(a.grad + row * a.n + first + p * step);
      next_saved[p] = load_pack<kPack>(a.saved + row * a.n + first + p * step);
    }
    if (!kFromOutput && a.mean) next_mean = a.mean[row];
    next_rstd = a.rstd[row];
  };

  int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y;
  fetch(base + threadIdx.y);
  for (; base < a.rows; base += stride) {  // the same number of turns for the whole block
    const int64_t row = base + threadIdx.y;
    const int end = row < a.rows ? n : 0;
    const A mean = next_mean, rstd = next_rstd;
    A g[kPacks][kPack], h[kPacks][kPack], sums[2] = {0, 0};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      widen(next_grad[p], g[p]);
      widen(next_saved[p], h[p]);
    }
    if constexpr (!kFromOutput) fetch(row + stride);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * step >= end) continue;
      A weight[kPack];
      to_normalized<kFromOutput>(a, first + p * step, mean, rstd, h[p], weight);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if constexpr (kParameters) {
          dweight[p][i] += g[p][i] * h[p][i];
          dbias[p][i] += g[p][i];
        }
        g[p][i] *= weight[i];
      }
      add_to_sums(sums, g[p], h[p]);
    }
    sum_over_row(sums, turn);
    const A means[2] = {a.centered ? sums[0] / static_cast<A>(n) : A(0), sums[1] / static_cast<A>(n)};
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (first + p * step < end) store_gradient(a, row * a.n + first + p * step, g[p], h[p], means, rstd);
    if constexpr (kFromOutput) fetch(row + stride);  // no earlier: the division leaves no registers for it
  }

  if constexpr (kParameters) {
    // What the threads of one column summed: first those of a warp, then warp by warp in the order of threadIdx.y.
    for (unsigned offset = blockDim.x; offset < 32; offset *= 2)
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          dweight[p][i] += __shfl_xor_sync(0xffffffffu, dweight[p][i], offset);
          dbias[p][i] += __shfl_xor_sync(0xffffffffu, dbias[p][i], offset);
        }
    const unsigned rows_per_warp = blockDim.x < 32 ? 32 / blockDim.x : 1;
    __shared__ A shared[2][kPacks * kPack][kSharedThreads];
    A* out = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.n;
    const auto add_up = [&](A(&sums)[kPacks][kPack], A(&shared)[kPacks * kPack][kSharedThreads], A* out) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (threadIdx.y > 0) sums[p][i] += shared[p * kPack + i][threadIdx.x];
          if (threadIdx.y + rows_per_warp < blockDim.y) shared[p * kPack + i][threadIdx.x] = sums[p][i];
        }
        if (threadIdx.y + rows_per_warp == blockDim.y && first + p * step < n) store_pack(out + first + p * step, sums[p]);
      }
    };
    for (unsigned y = 0; y < blockDim.y; y += rows_per_warp) {
      if (threadIdx.y == y) {
        add_up(dweight, shared[0], out);
        add_up(dbias, shared[1], out + a.n);
      }
      __syncthreads();
    }
  }
}

// Rows of which registers hold the sums alone: x and dy are copied to shared memory, the next row while one is computed. Each
// thread reads what it copied itself, so none waits for another.
template <typename G, typename S, typename D, typename W, int kPack, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) staged_backward_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  extern __shared__ uint4 staged[];  // two rows of dy and two of x, each [kPacks][blockDim.x] packs
  const int n = static_cast<int>(a.n), step = blockDim.x * kPack, first = threadIdx.x * kPack;
  auto* const grad = reinterpret_cast<Pack<G, kPack>*>(staged);
  auto* const x = reinterpret_cast<Pack<S, kPack>*>(grad + 2 * kPacks * blockDim.x);
  const auto place = [&](int turn, int p) { return (turn % 2 * kPacks + p) * blockDim.x + threadIdx.x; };
  const auto fetch = [&](int64_t row, int turn) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (row >= a.rows || first + p * step >= n) continue;
      const int64_t at = row * a.n + first + p * step;
      __pipeline_memcpy_async(&grad[place(turn, p)], a.grad + at, sizeof(Pack<G, kPack>));
      __pipeline_memcpy_async(&x[place(turn, p)], a.saved + at, sizeof(Pack<S, kPack>));
    }
    __pipeline_commit();
  };
  A dweight[kPacks][kPack] = {}, dbias[kPacks][kPack] = {};
  unsigned turn = 0;
  fetch(blockIdx.x, 0);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int now = turn;  // sum_over_row counts on
    fetch(row + gridDim.x, now + 1);
    const A mean = a.mean ? a.mean[row] : A(0), rstd = a.rstd[row];
    __pipeline_wait_prior(1);  // for all but the next row
    const auto for_each_pack = [&](auto&& f) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (first + p * step >= n) continue;
        A g[kPack], h[kPack], weight[kPack];
        widen(load_pack<kPack>(grad[place(now, p)].value), g);
        widen(load_pack<kPack>(x[place(now, p)].value), h);
        to_normalized<false>(a, first + p * step, mean, rstd, h, weight);
        f(p, g, h, weight);
      }
    };
    A sums[2] = {0, 0};
    for_each_pack([&](int p, A(&g)[kPack], A(&h)[kPack], A(&weight)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        dweight[p][i] += g[i] * h[i];
        dbias[p][i] += g[i];
        g[i] *= weight[i];
      }
      add_to_sums(sums, g, h);
    });
    sum_over_row(sums, turn);
    const A means[2] = {a.centered ? sums[0] / static_cast<A>(n) : A(0), sums[1] / static_cast<A>(n)};
    for_each_pack([&](int p, A(&g)[kPack], A(&h)[kPack], A(&weight)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] *= weight[i];
      store_gradient(a, row * a.n + first + p * step, g, h, means, rstd);
    });
  }
  A* out = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.n + first;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (first + p * step >= n) continue;
    store_pack(out + p * step, dweight[p]);
    store_pack(out + a.n + p * step, dbias[p]);
  }
}

// Rows that are not kept: read twice, the second time from the cache.
template <typename G, typename S, typename D, typename W, int kPack, bool kFromOutput>
__global__ void __launch_bounds__(kMaxThreads, kFromOutput ? 1 : 2) wide_backward_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kPack, first = static_cast<int64_t>(threadIdx.x) * kPack;
  unsigned turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const A mean = !kFromOutput && a.mean ? a.mean[row] : A(0), rstd = a.rstd[row];
    const auto for_each_pack = [&](auto&& f) {
#pragma unroll 2
      for (int64_t column = first; column < a.n; column += step) {
        A g[kPack], h[kPack], weight[kPack];
        widen(load_pack<kPack>(a.grad + row * a.n + column), g);
        widen(load_pack<kPack>(a.saved + row * a.n + column), h);
        to_normalized<kFromOutput>(a, column, mean, rstd, h, weight);
#pragma unroll
        for (int i = 0; i < kPack; ++i) g[i] *= weight[i];
        f(g, h, column);
      }
    };
    A sums[2] = {0, 0};
    for_each_pack([&](A(&g)[kPack], A(&h)[kPack], int64_t) { add_to_sums(sums, g, h); });
    sum_over_row(sums, turn);
    const A means[2] = {a.centered ? sums[0] / static_cast<A>(a.n) : A(0), sums[1] / static_cast<A>(a.n)};
    for_each_pack([&](A(&g)[kPack], A(&h)[kPack], int64_t column) {
      store_gradient(a, row * a.n + column, g, h, means, rstd);
    });
  }
}

// The parameters' sums by themselves, for rows that are not kept: block (x, y) sums 32 columns of its share of the rows.
constexpr int kTileRows = 8;

template <typename G, typename S, typename D, typename W, bool kFromOutput>
__global__ void __launch_bounds__(32 * kTileRows, 1) parameters_kernel(const BackwardArguments<G, S, D, W> a) {
  using A = Compute<S>;
  __shared__ A tile[2][kTileRows][32];
  for (int64_t tile_column = static_cast<int64_t>(blockIdx.x) * 32; tile_column < a.n;
       tile_column += static_cast<int64_t>(gridDim.x) * 32) {
    const int64_t column = tile_column + threadIdx.x;
    A dweight = 0, dbias = 0;
    if (column < a.n) {
#pragma unroll 4
      for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + threadIdx.y; row < a.rows;
           row += static_cast<int64_t>(gridDim.y) * kTileRows) {
        A h[1] = {static_cast<A>(a.saved[row * a.n + column])}, weight[1];
        const A dy = static_cast<A>(a.grad[row * a.n + column]);
        to_normalized<kFromOutput>(a, column, !kFromOutput && a.mean ? a.mean[row] : A(0), a.rstd[row], h, weight);
        dweight += dy * h[0];
        dbias += dy;
      }
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
