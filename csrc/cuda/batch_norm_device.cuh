// What the CUDA kernels of batch norm share: shapes in packs of P elements, the vectors of C, loads, the ReLU's mask.
#pragma once

#include "../batch_norm.h"
#include "common.cuh"

namespace apexfx {
namespace batch_norm {

constexpr int kThreads = 256;

// A contiguous (N, C, L): `packs` a plane.
struct PlaneShape {
  int64_t outer, channels, packs;
};

// How far the blocks that share a channel of planes advance together: planes, and packs of one.
struct PlaneStep {
  int64_t planes, packs;
};

// Rows of columns: `packs` a row. A column is a channel (channels_last: kPlanes = false), or a channel has `length` neighbours: its
// plane, in a row that is a whole image.
struct RowShape {
  int64_t rows, packs;
  int length;
};

// Fills `out` for the columns of a thread's pack by load(channel, constants of some channels). Of planes, which have two columns or
// more, a thread loads one channel for the block.
template <bool kPlanes, typename Constants, int P, typename F>
__device__ __forceinline__ void load_columns(const RowShape& shape, Constants (&out)[P], F&& load) {
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * blockDim.x, pack = first_pack + threadIdx.x;
  if constexpr (!kPlanes) {
    if (pack < shape.packs) load(pack * P, out);
  } else {
    __shared__ Constants shared[kThreads][1];
    const int64_t end = (first_pack + blockDim.x < shape.packs ? first_pack + blockDim.x : shape.packs) * P;
    const int64_t first = first_pack * P / shape.length, mine = first + threadIdx.y * blockDim.x + threadIdx.x;
    if (mine * shape.length < end) load(mine, shared[mine - first]);
    __syncthreads();
    if (pack >= shape.packs) return;
    int channel = static_cast<int>(pack * P / shape.length - first), offset = static_cast<int>(pack * P % shape.length);
#pragma unroll
    for (int k = 0; k < P; ++k) {
      out[k] = shared[channel][0];
      if (++offset == shape.length) offset = 0, ++channel;
    }
  }
}

template <typename E, int P>
__device__ __forceinline__ PackedWords<E, P> load_pack(const E* data, int64_t pack) {
  return reinterpret_cast<const PackedWords<E, P>*>(data)[pack];
}

template <typename E, int P>
__device__ __forceinline__ void store_pack(E* data, int64_t pack, const Compute<E> (&values)[P]) {
  store(reinterpret_cast<PackedWords<E, P>*>(data) + pack, PackedWords<E, P>(values));
}

template <typename S, int P>
__device__ __forceinline__ void load_as_double(const void* data, int64_t c, double (&out)[P]) {
#pragma unroll
  for (int k = 0; k < P; ++k) out[k] = static_cast<double>(static_cast<Compute<S>>(static_cast<const S*>(data)[c + k]));
}

// P channels from c on: the dtype is looked at once.
template <int P>
__device__ __forceinline__ void load_parameters(const void* data, ScalarType dtype, int64_t c, double otherwise,
                                                double (&out)[P]) {
  if (data == nullptr) {
#pragma unroll
    for (int k = 0; k < P; ++k) out[k] = otherwise;
    return;
  }
  switch (dtype) {
    case ScalarType::Double: return load_as_double<double>(data, c, out);
    case ScalarType::Float: return load_as_double<float>(data, c, out);
    case ScalarType::Half: return load_as_double<Half>(data, c, out);
    default: return load_as_double<BFloat16>(data, c, out);
  }
}

__device__ __forceinline__ double load_parameter(const void* data, ScalarType dtype, int64_t c) {
  double value[1];
  load_parameters(data, dtype, c, 0, value);
  return value[0];
}

__device__ __forceinline__ void store_parameter(void* data, ScalarType dtype, int64_t c, double value) {
  switch (dtype) {
    case ScalarType::Double: static_cast<double*>(data)[c] = value; break;
    case ScalarType::Float: static_cast<float*>(data)[c] = static_cast<float>(value); break;
    case ScalarType::Half: static_cast<Half*>(data)[c] = Half(static_cast<float>(value)); break;
    default: static_cast<BFloat16*>(data)[c] = BFloat16(static_cast<float>(value));
  }
}

// A vector of C that a kernel writes, of any floating dtype; null where there is none.
struct ChannelBuffer {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
};

// Moves channel c of the running buffers, in place, towards the batch's moments.
__device__ __forceinline__ void move_running(double count, const Moments& m, const ChannelBuffer& mean,
                                             const ChannelBuffer& var, int64_t c, double momentum,
                                             const int64_t* tracked) {
  const double given = tracked == nullptr ? momentum : reciprocal(static_cast<double>(*tracked));
  const double share = count > 0 ? given : 0;
  store_parameter(mean.data, mean.dtype, c, moved(load_parameter(mean.data, mean.dtype, c), m.mean, share));
  store_parameter(var.data, var.dtype, c, moved(load_parameter(var.data, var.dtype, c), unbiased(m), share));
}

struct ChannelVectors {
  const double *mean, *invstd;
  const void *weight, *bias;
  ScalarType weight_dtype, bias_dtype;
  const double *sums, *count;  // bn_backward_elementwise only
  int64_t channels;

  template <typename T, int P>
  __device__ __forceinline__ void affine_of(int64_t c, Affine<T> (&out)[P]) const {
    double w[P], b[P];
    load_parameters(weight, weight_dtype, c, 1, w);
    load_parameters(bias, bias_dtype, c, 0, b);
#pragma unroll
    for (int k = 0; k < P; ++k) out[k] = affine<T>(mean[c + k], invstd[c + k], w[k], b[k]);
  }
  template <typename T, int P>
  __device__ __forceinline__ void gradient_of(int64_t c, InputGradient<T> (&out)[P]) const {
    double w[P];
    load_parameters(weight, weight_dtype, c, 1, w);
#pragma unroll
    for (int k = 0; k < P; ++k)
      out[k] = input_gradient<T>(mean[c + k], invstd[c + k], w[k], sums[c + k], sums[channels + c + k], *count);
  }
};

// The gradient that passes the ReLU, whose input is computed again.
template <typename E, typename T>
__device__ __forceinline__ T masked(T grad, T centered, T scale, T shift, bool relu) {
  return relu && centered * scale + shift <= largest_zero<E>() ? T(0) : grad;
}

}  // namespace batch_norm
}  // namespace apexfx
