// The elementwise halves of batch norm: bn_normalize and bn_backward_elementwise. `Op` holds the vectors of C, the
// operands and the formula: `Op::Constants` for a channel, `Op::Inputs` for what one pack reads.
#pragma once

#include "batch_norm_device.cuh"

namespace apexfx {
namespace batch_norm {

// y = (x - mean) * invstd * weight + bias [+ residual] [ReLU]
template <typename E, int P>
struct Normalize {
  using T = Compute<E>;
  using Constants = Affine<T>;
  struct Inputs {
    Pack<E, P> x, residual;
  };
  ChannelVectors vectors;
  const E *x, *residual;
  E* y;
  bool relu;

  __device__ __forceinline__ Constants constants(int64_t c) const { return vectors.affine_of<T>(c); }
  __device__ __forceinline__ Inputs load(int64_t pack) const {
    Inputs in{load_pack<E, P>(x, pack), {}};
    if (residual != nullptr) in.residual = load_pack<E, P>(residual, pack);
    return in;
  }
  __device__ __forceinline__ E apply(const Inputs& in, int k, const Constants& affine) const {
    T value = affine(static_cast<T>(in.x.value[k]));
    if (residual != nullptr) value += static_cast<T>(in.residual.value[k]);
    return static_cast<E>(relu ? batch_norm::relu(value) : value);
  }
};

// dx = g * per_grad + (x - center) * per_x + constant
template <typename E, int P>
struct Gradient {
  using T = Compute<E>;
  struct Constants {
    Affine<T> affine;
    InputGradient<T> gradient;
  };
  struct Inputs {
    Pack<E, P> grad, x;
  };
  ChannelVectors vectors;
  const E *grad, *x;
  E* y;
  bool relu;

  __device__ __forceinline__ Constants constants(int64_t c) const {
    return {vectors.affine_of<T>(c), vectors.gradient_of<T>(c)};
  }
  __device__ __forceinline__ Inputs load(int64_t pack) const {
    return {load_pack<E, P>(grad, pack), load_pack<E, P>(x, pack)};
  }
  __device__ __forceinline__ E apply(const Inputs& in, int k, const Constants& c) const {
    const T d = static_cast<T>(in.x.value[k]) - c.affine.center;
    const T g = masked<E>(static_cast<T>(in.grad.value[k]), d, c.affine.scale, c.affine.shift, relu);
    return static_cast<E>(c.gradient(g, d));
  }
};

constexpr int kPacksInFlight = 4;

// threadIdx.y is a plane of the block's, threadIdx.x and blockIdx.y go along it.
template <template <typename, int> class Op, typename E, int P>
__global__ void __launch_bounds__(kThreads) plane_kernel(Op<E, P> op, PlaneShape shape) {
  __shared__ typename Op<E, P>::Constants shared[kThreads];
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool inside = plane < shape.outer * shape.channels;
  if (threadIdx.x == 0 && inside) shared[threadIdx.y] = op.constants(plane % shape.channels);
  __syncthreads();
  if (!inside) return;
  const auto constants = shared[threadIdx.y];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x * kPacksInFlight + threadIdx.x;
  typename Op<E, P>::Inputs in[kPacksInFlight];
#pragma unroll
  for (int k = 0; k < kPacksInFlight; ++k)
    if (first + k * blockDim.x < shape.packs) in[k] = op.load(plane * shape.packs + first + k * blockDim.x);
#pragma unroll
  for (int k = 0; k < kPacksInFlight; ++k) {
    if (first + k * blockDim.x >= shape.packs) break;
    Pack<E, P> out;
#pragma unroll
    for (int j = 0; j < P; ++j) out.value[j] = op.apply(in[k], j, constants);
    store_pack<E, P>(op.y, plane * shape.packs + first + k * blockDim.x, out);
  }
}

// threadIdx.x is a pack of channels, threadIdx.y and blockIdx.y share the rows.
template <template <typename, int> class Op, typename E, int P>
__global__ void __launch_bounds__(kThreads) row_kernel(Op<E, P> op, RowShape shape) {
  constexpr int kRows = 2;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pack >= shape.packs) return;
  typename Op<E, P>::Constants constants[P];
#pragma unroll
  for (int k = 0; k < P; ++k) constants[k] = op.constants(pack * P + k);
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < shape.rows; row += kRows * step) {
    typename Op<E, P>::Inputs in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (row + r * step < shape.rows) in[r] = op.load((row + r * step) * shape.packs + pack);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * step >= shape.rows) break;
      Pack<E, P> out;
#pragma unroll
      for (int k = 0; k < P; ++k) out.value[k] = op.apply(in[r], k, constants[k]);
      store_pack<E, P>(op.y, (row + r * step) * shape.packs + pack, out);
    }
  }
}

}  // namespace batch_norm
}  // namespace apexfx
