// The elementwise halves of batch norm: bn_normalize and bn_backward_elementwise. `Op` holds the vectors of C, the
// operands and the formula: `Op::Constants` of a channel, `Op::Inputs` for what one pack reads.
#pragma once

#include "batch_norm_device.cuh"

namespace apexfx {
namespace batch_norm {

// y = (x - mean) * invstd * weight + bias [+ residual] [ReLU]
template <typename E, int P>
struct Normalize {
  using T = Compute<E>;
  using Constants = Affine<T>;
  static constexpr int kRows = P == 8 ? 4 : 2;
  struct Inputs {
    PackedWords<E, P> x, residual;
  };
  ChannelVectors vectors;
  const E *x, *residual;
  E* y;
  bool relu;

  template <int C>
  __device__ __forceinline__ void load_constants(int64_t c, Constants (&out)[C]) const {
    vectors.affine_of(c, out);
  }
  __device__ __forceinline__ Inputs load(int64_t pack) const {
    Inputs in{load_pack<E, P>(x, pack), {}};
    if (residual != nullptr) in.residual = load_pack<E, P>(residual, pack);
    return in;
  }
  // Element k of the pack, with the constants of its channel.
  __device__ __forceinline__ T apply(const Inputs& in, int k, const Constants& constants) const {
    T value = constants(in.x[k]);
    if (residual != nullptr) value += in.residual[k];
    return relu ? batch_norm::relu(value) : value;
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
  static constexpr int kRows = P == 8 ? 3 : 2;
  struct Inputs {
    PackedWords<E, P> grad, x;
  };
  ChannelVectors vectors;
  const E *grad, *x;
  E* y;
  bool relu;

  template <int C>
  __device__ __forceinline__ void load_constants(int64_t c, Constants (&out)[C]) const {
    Affine<T> affine[C];
    vectors.affine_of(c, affine);
#pragma unroll
    for (int k = 0; k < C; ++k) out[k].affine = affine[k];
    InputGradient<T> gradient[C];
    vectors.gradient_of(c, gradient);
#pragma unroll
    for (int k = 0; k < C; ++k) out[k].gradient = gradient[k];
  }
  __device__ __forceinline__ Inputs load(int64_t pack) const {
    return {load_pack<E, P>(grad, pack), load_pack<E, P>(x, pack)};
  }
  __device__ __forceinline__ T apply(const Inputs& in, int k, const Constants& constants) const {
    const Affine<T>& affine = constants.affine;
    const T d = in.x[k] - affine.center;
    const T g = masked<E>(in.grad[k], d, affine.scale, affine.shift, relu);
    return constants.gradient(g, d);
  }
};

template <int P>
constexpr int kPacksInFlight = P == 8 ? 2 : 4;
constexpr int kMostBlocks = 1024;  // along a plane; they fill a device, and gridDim.y has an end

// threadIdx.y is a plane of the block's, threadIdx.x and blockIdx.y go along it.
template <template <typename, int> class Op, typename E, int P>
__global__ void __launch_bounds__(kThreads) plane_kernel(Op<E, P> op, PlaneShape shape) {
  constexpr int kPacks = kPacksInFlight<P>;
  using Constants = typename Op<E, P>::Constants;
  __shared__ Constants shared[kThreads / 32][1];
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool inside = plane < shape.outer * shape.channels;
  const int64_t begin = plane * shape.packs, packs = inside ? shape.packs : 0;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x * kPacks;
  int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x * kPacks + threadIdx.x;
  Constants constants;
  bool known = false;
  do {
    typename Op<E, P>::Inputs in[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (first + k * blockDim.x < packs) in[k] = op.load(begin + first + k * blockDim.x);
    if (!known) {  // the whole block's first turn; the loads are under way
      if (threadIdx.x == 0 && inside) op.load_constants(plane % shape.channels, shared[threadIdx.y]);
      __syncthreads();
      constants = shared[threadIdx.y][0];
      known = true;
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first + k * blockDim.x >= packs) break;
      Compute<E> out[P];
#pragma unroll
      for (int j = 0; j < P; ++j) out[j] = op.apply(in[k], j, constants);
      store_pack<E, P>(op.y, begin + first + k * blockDim.x, out);
    }
    first += step;
  } while (first < packs);
}

// threadIdx.x is a pack of columns, threadIdx.y and blockIdx.y share the rows.
template <template <typename, int> class Op, typename E, int P, bool kPlanes>
__global__ void __launch_bounds__(kThreads, P == 8 ? 2 : 0) row_kernel(Op<E, P> op, RowShape shape) {
  constexpr int kRows = Op<E, P>::kRows;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  typename Op<E, P>::Constants constants[P];
  load_columns<kPlanes>(shape, constants, [&](int64_t c, auto& out) { op.load_constants(c, out); });
  if (pack >= shape.packs) return;
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
      Compute<E> out[P];
#pragma unroll
      for (int k = 0; k < P; ++k) out[k] = op.apply(in[r], k, constants[k]);
      store_pack<E, P>(op.y, (row + r * step) * shape.packs + pack, out);
    }
  }
}

}  // namespace batch_norm
}  // namespace apexfx
