// Per-channel sums of batch norm: of x and x^2 (bn_local_stats), of g and g * (x - mean) (bn_backward_reduce).
//
// Every block sums a share of one channel (planes) or of a few channels (rows); shares are added up in a second kernel
// in a fixed order, so results repeat exactly. x arrives in groups: the deviations from a group's rounded mean correct
// that mean and are squared, and both are merged into the thread's own by Chan's update, means in float64. A thread ends
// with sum x = n * mean and sum x^2 = M2 + n * mean^2 in float64, which add up.
#pragma once

#include <cub/block/block_reduce.cuh>

#include "batch_norm_device.cuh"

namespace apexfx {
namespace batch_norm {

constexpr int kGroup = 4;        // packs in flight a thread
constexpr int kPlaneBlocks = 4;  // on a multiprocessor: 64 registers; left alone, ptxas takes fewer and spills
// Rows that end in one double operation a channel: of 16 bits a pack has twice the channels, in as many bytes.
template <int P>
constexpr int kSumRows = P == 8 ? 8 : kGroup;

struct AddSums {
  __device__ Sums operator()(const Sums& a, const Sums& b) const {
    return {a.total + b.total, a.of_squares + b.of_squares};
  }
};

// The count is kept outside: channels of one thread share it.
struct Running {
  double mean = 0, m2 = 0;

  // Merges K values; n is how many came before, share = K / (n + K).
  template <typename T, int K>
  __device__ void add(const T (&v)[K], double n, double share) {
    T sum = 0, rest = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < K; ++i) sum += v[i];
    const T center = sum / K;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const T d = v[i] - center;
      rest += d;
      squares += d * d;
    }
    rest /= K;
    const double delta = static_cast<double>(center) + static_cast<double>(rest) - mean;
    mean += delta * share;
    m2 += static_cast<double>(squares - K * rest * rest) + delta * delta * n * share;
  }

  __device__ Sums sums(double n) const { return {n * mean, m2 + n * mean * mean}; }
};

// Walks the packs of one channel of a contiguous (N, C, L): from `start` in steps of `step`, without a division a pack.
struct PlaneCursor {
  int64_t plane_packs, row_packs, n, offset;
  PlaneStep step;

  // start is below 65536 * kThreads
  __device__ PlaneCursor(const PlaneShape& shape, uint32_t start, const PlaneStep& step_)
      : plane_packs(shape.packs), row_packs(shape.channels * shape.packs), step(step_) {
    const uint32_t packs = shape.packs > 0xffffffffll ? 0xffffffffu : static_cast<uint32_t>(shape.packs);
    n = start / packs;
    offset = start % packs;
  }
  __device__ int64_t pack(int64_t channel) const { return n * row_packs + channel * plane_packs + offset; }
  __device__ void advance() {
    n += step.planes;
    offset += step.packs;
    if (offset >= plane_packs) {
      offset -= plane_packs;
      ++n;
    }
  }
};

// partial: [splits][2][C]; blockIdx.x is the channel, blockIdx.y the share.
template <typename E, int P>
__global__ void __launch_bounds__(kThreads, kPlaneBlocks)
    plane_sums_kernel(const E* __restrict__ x, PlaneShape shape, PlaneStep plane_step, double* __restrict__ partial,
                      double* __restrict__ count) {
  using T = Compute<E>;
  using Reduce = cub::BlockReduce<Sums, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const int64_t channel = blockIdx.x, total = shape.outer * shape.packs;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  PlaneCursor cursor(shape, static_cast<uint32_t>(i), plane_step);
  Running running;
  double n = 0;
  for (; i + (kGroup - 1) * step < total; i += kGroup * step) {
    PackedWords<E, P> in[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      in[k] = load_pack<E, P>(x, cursor.pack(channel));
      cursor.advance();
    }
    T v[kGroup * P];
#pragma unroll
    for (int k = 0; k < kGroup * P; ++k) v[k] = in[k / P][k % P];
    running.add(v, n, kGroup * P * reciprocal(n + kGroup * P));
    n += kGroup * P;
  }
  for (; i < total; i += step) {
    const PackedWords<E, P> in = load_pack<E, P>(x, cursor.pack(channel));
    cursor.advance();
    T v[P];
#pragma unroll
    for (int k = 0; k < P; ++k) v[k] = in[k];
    running.add(v, n, P * reciprocal(n + P));
    n += P;
  }
  const Sums sums = Reduce(scratch).Reduce(running.sums(n), AddSums{});
  if (threadIdx.x != 0) return;
  double* out = partial + static_cast<int64_t>(blockIdx.y) * 2 * shape.channels + channel;
  out[0] = sums.total;
  out[shape.channels] = sums.of_squares;
  if (channel == 0 && blockIdx.y == 0) *count = static_cast<double>(total * P);
}

template <typename E, int P>
__global__ void __launch_bounds__(kThreads, kPlaneBlocks)
    plane_gradient_sums_kernel(const E* __restrict__ grad, const E* __restrict__ x, PlaneShape shape,
                               PlaneStep plane_step, ChannelVectors vectors, bool relu, double* __restrict__ partial) {
  using T = Compute<E>;
  using Reduce = cub::BlockReduce<Sums, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const int64_t channel = blockIdx.x, total = shape.outer * shape.packs;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  Affine<T> affine[1];
  vectors.affine_of(channel, affine);
  const T center = affine[0].center, scale = affine[0].scale, shift = affine[0].shift;
  int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  PlaneCursor cursor(shape, static_cast<uint32_t>(i), plane_step);
  Sums all{0, 0};
  const auto add = [&](const PackedWords<E, P>& g_in, const PackedWords<E, P>& x_in) {
    T total_g = 0, products = 0;
#pragma unroll
    for (int k = 0; k < P; ++k) {
      const T d = x_in[k] - center;
      const T g = masked<E>(g_in[k], d, scale, shift, relu);
      total_g += g;
      products += g * d;
    }
    all.total += static_cast<double>(total_g);
    all.of_squares += static_cast<double>(products);
  };
  for (; i + (kGroup - 1) * step < total; i += kGroup * step) {
    PackedWords<E, P> g_in[kGroup], x_in[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      g_in[k] = load_pack<E, P>(grad, cursor.pack(channel));
      x_in[k] = load_pack<E, P>(x, cursor.pack(channel));
      cursor.advance();
    }
#pragma unroll
    for (int k = 0; k < kGroup; ++k) add(g_in[k], x_in[k]);
  }
  for (; i < total; i += step) {
    add(load_pack<E, P>(grad, cursor.pack(channel)), load_pack<E, P>(x, cursor.pack(channel)));
    cursor.advance();
  }
  const Sums sums = Reduce(scratch).Reduce(all, AddSums{});
  if (threadIdx.x != 0) return;
  double* out = partial + static_cast<int64_t>(blockIdx.y) * 2 * shape.channels + channel;
  out[0] = sums.total;
  out[shape.channels] = sums.of_squares - (vectors.mean[channel] - static_cast<double>(center)) * sums.total;
}

// Adds each column's sums over threadIdx.y, where kPlanes also those of a channel's columns, which are all the block's, and
// writes finish(channel, sums) into [2][C] of this share; `scratch` holds kThreads * P sums.
template <bool kPlanes, int P, typename F>
__device__ void write_columns(const Sums (&sums)[P], Sums* scratch, const RowShape& shape, double* partial, F&& finish) {
  const int width = blockDim.x * P, threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int length = kPlanes ? shape.length : 1, block_channels = width / length;
  const auto sum_of = [](const Sums* at, int count, int step) {
    Sums sum{0, 0};
    for (int i = 0; i < count; i += step) sum = AddSums{}(sum, at[i]);
    return sum;
  };
  const auto write = [&](int block_channel, const Sums& sum) {
    const int64_t channels = shape.packs * P / length;
    const int64_t channel = static_cast<int64_t>(blockIdx.x) * block_channels + block_channel;
    if (channel >= channels) return;
    const Sums out = finish(channel, sum);
    double* const to = partial + static_cast<int64_t>(blockIdx.y) * 2 * channels + channel;
    to[0] = out.total;
    to[channels] = out.of_squares;
  };
#pragma unroll
  for (int k = 0; k < P; ++k) scratch[threadIdx.y * width + threadIdx.x * P + k] = sums[k];
  __syncthreads();
  for (int column = thread; column < width; column += threads) {
    const Sums sum = sum_of(scratch + column, blockDim.y * width, width);
    if constexpr (kPlanes) scratch[column] = sum;
    else write(column, sum);
  }
  if constexpr (kPlanes) {
    constexpr int kParts = 16;  // threads that share a channel
    __syncthreads();
    for (int j = thread; j < block_channels * kParts; j += threads) {
      const int part = j % kParts;
      Sums* const columns = scratch + j / kParts * length + part;
      if (part < length) *columns = sum_of(columns, length - part, kParts);
    }
    __syncthreads();
    for (int j = thread; j < block_channels; j += threads) write(j, sum_of(scratch + j * length, length < kParts ? length : kParts, 1));
  }
}

// Rows: threadIdx.x is a pack of columns, threadIdx.y and blockIdx.y share the rows.
template <typename E, int P, bool kPlanes>
__global__ void __launch_bounds__(kThreads) row_sums_kernel(const E* __restrict__ x, RowShape shape,
                                                            double* __restrict__ partial, double* __restrict__ count) {
  using T = Compute<E>;
  __shared__ Sums scratch[kThreads * P];
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  Running running[P];
  double n = 0;
  const auto add_rows = [&](auto rows) {
    constexpr int K = decltype(rows)::value;
    PackedWords<E, P> in[K];
#pragma unroll
    for (int k = 0; k < K; ++k) in[k] = load_pack<E, P>(x, (row + k * step) * shape.packs + pack);
    const double share = K * reciprocal(n + K);
#pragma unroll
    for (int c = 0; c < P; ++c) {
      T v[K];
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] = in[k][c];
      running[c].add(v, n, share);
    }
    n += K;
    row += K * step;
  };
  if (pack < shape.packs) {
    constexpr int kRows = kSumRows<P>;
    while (row + (kRows - 1) * step < shape.rows) add_rows(std::integral_constant<int, kRows>{});
    if (kRows > 4 && row + 3 * step < shape.rows) add_rows(std::integral_constant<int, 4>{});
    while (row < shape.rows) add_rows(std::integral_constant<int, 1>{});
  }
  Sums sums[P];
#pragma unroll
  for (int c = 0; c < P; ++c) sums[c] = running[c].sums(n);
  write_columns<kPlanes>(sums, scratch, shape, partial, [](int64_t, const Sums& sum) { return sum; });
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0)
    *count = static_cast<double>(shape.rows * (kPlanes ? shape.length : 1));
}

template <typename E, int P, bool kPlanes>
__global__ void __launch_bounds__(kThreads, P == 8 ? 2 : P == 4 && sizeof(E) == 4 ? 4 : 1)
    row_gradient_sums_kernel(const E* __restrict__ grad, const E* __restrict__ x, RowShape shape,
                             ChannelVectors vectors, bool relu, double* __restrict__ partial) {
  using T = Compute<E>;
  __shared__ Sums scratch[kThreads * P];
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  Sums sums[P] = {};
  Affine<T> affine[P];
  load_columns<kPlanes>(shape, affine, [&](int64_t c, auto& out) { vectors.affine_of(c, out); });
  const auto add_rows = [&](auto rows) {
    constexpr int K = decltype(rows)::value;
    PackedWords<E, P> g_in[K], x_in[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      g_in[k] = load_pack<E, P>(grad, (row + k * step) * shape.packs + pack);
      x_in[k] = load_pack<E, P>(x, (row + k * step) * shape.packs + pack);
    }
#pragma unroll
    for (int c = 0; c < P; ++c) {
      T total = 0, products = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const T d = x_in[k][c] - affine[c].center;
        const T g = masked<E>(g_in[k][c], d, affine[c].scale, affine[c].shift, relu);
        total += g;
        products += g * d;
      }
      sums[c].total += static_cast<double>(total);
      sums[c].of_squares += static_cast<double>(products);
    }
    row += K * step;
  };
  if (pack < shape.packs) {
    constexpr int kRows = kSumRows<P> / 2;  // two operands
    while (row + (kRows - 1) * step < shape.rows) add_rows(std::integral_constant<int, kRows>{});
    while (row < shape.rows) add_rows(std::integral_constant<int, 1>{});
  }
  write_columns<kPlanes>(sums, scratch, shape, partial, [&](int64_t channel, const Sums& sum) {
    const double mean = vectors.mean[channel], rounded = static_cast<double>(static_cast<T>(mean));
    return Sums{sum.total, sum.of_squares - (mean - rounded) * sum.total};
  });
}

// out[j] = the sum over `splits` of partial[s][j]; threadIdx.x is j, threadIdx.y shares the splits.
constexpr int kSplitRows = 32;

__global__ void __launch_bounds__(32 * kSplitRows)
    add_splits_kernel(const double* __restrict__ partial, int splits, int64_t length, double* __restrict__ out) {
  __shared__ double shared[kSplitRows][32];
  const int64_t j = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  double sum = 0;
  if (j < length)
#pragma unroll 8
    for (int s = threadIdx.y; s < splits; s += kSplitRows) sum += partial[s * length + j];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || j >= length) return;
  for (int y = 1; y < kSplitRows; ++y) sum += shared[y][threadIdx.x];
  out[j] = sum;
}

}  // namespace batch_norm
}  // namespace apexfx
