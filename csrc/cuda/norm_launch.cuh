// Chooses the shape of a launch of the kernels in norm_forward.cuh and norm_backward.cuh; instantiated once for each input
// dtype (norm_*.cu).
#pragma once

#include "norm_backward.cuh"
#include "norm_cuda.h"
#include "norm_forward.cuh"

namespace apexfx {
namespace norm {

// Columns a thread keeps: as many as registers hold without spilling. The backward keeps two values and two sums each.
template <typename T>
constexpr int kForwardPacks = (sizeof(T) == 8 ? 16 : 32) / kPackSize<T>;
template <typename T>
constexpr int kBackwardPacks = (sizeof(T) == 8 ? 8 : 16) / kPackSize<T>;

// Threads for a row of n columns, whole warps; more than kMaxThreads where the row cannot be kept.
inline int64_t threads_for(int64_t n, int64_t columns_per_thread) {
  return (n + columns_per_thread * 32 - 1) / (columns_per_thread * 32) * 32;
}

inline dim3 block_for(int64_t threads) {
  return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(std::max<int64_t>(1, kBlockThreads / threads)));
}

inline unsigned grid_for(int64_t rows, dim3 block) {
  return static_cast<unsigned>(std::min<int64_t>((rows + block.y - 1) / block.y, int64_t{1} << 30));
}

template <typename T, int N>
bool fits(const T* pointer) {
  return is_aligned(pointer, sizeof(T) * N);
}

template <typename T>
const T* data_of(const Optional& t) {
  return t.has_value() ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

template <typename X, typename W, typename Y>
void launch_forward(const ForwardTensors& t) {
  using A = Compute<X>;
  constexpr int N = kPackSize<X>;
  const ForwardArguments<X, W, Y> a{static_cast<const X*>(t.x.const_data_ptr()), data_of<W>(t.weight),
                                    data_of<W>(t.bias), static_cast<Y*>(t.y.mutable_data_ptr()),
                                    t.centered ? static_cast<A*>(t.mean.mutable_data_ptr()) : nullptr,
                                    static_cast<A*>(t.rstd.mutable_data_ptr()), t.rows.count, t.rows.columns,
                                    static_cast<A>(t.eps)};
  const bool packs = a.n % N == 0 && fits<X, N>(a.x) && fits<W, N>(a.weight) && fits<W, N>(a.bias) && fits<Y, N>(a.y);
  const cudaStream_t stream = current_stream(t.x);
  const int64_t threads = threads_for(a.n, N * kForwardPacks<X>);
  if (packs && threads <= kMaxThreads) {
    const dim3 block = block_for(threads);
    forward_kernel<X, W, Y, N, kForwardPacks<X>><<<grid_for(a.rows, block), block, 0, stream>>>(a);
  } else if (packs) {
    forward_kernel<X, W, Y, N, 0><<<grid_for(a.rows, dim3(kMaxThreads)), kMaxThreads, 0, stream>>>(a);
  } else {
    const dim3 block = block_for(std::min<int64_t>(kMaxThreads, threads_for(a.n, 8)));
    forward_kernel<X, W, Y, 1, 0><<<grid_for(a.rows, block), block, 0, stream>>>(a);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename A>
void finish_parameters(const BackwardTensors& t, const Tensor& partial, int64_t parts, cudaStream_t stream) {
  if (!t.inputs.weight.has_value() && !t.inputs.bias.has_value()) return;
  // The dtype the caller's parameters have; the kernels may have been given converted copies.
  const ScalarType dtype = (t.inputs.weight.has_value() ? t.dweight : t.dbias).scalar_type();
  const dim3 grid(static_cast<unsigned>((t.rows.columns + 31) / 32), 2), block(32, kTileRows);
  dispatch_float_or_double(dtype, t.inputs.op, "weight", [&](auto zero) {
    using P = decltype(zero);
    P* dweight = t.inputs.weight.has_value() ? static_cast<P*>(t.dweight.mutable_data_ptr()) : nullptr;
    P* dbias = t.inputs.bias.has_value() ? static_cast<P*>(t.dbias.mutable_data_ptr()) : nullptr;
    finish_kernel<A, P><<<grid, block, 0, stream>>>(static_cast<const A*>(partial.const_data_ptr()), parts,
                                                    t.rows.columns, dweight, dbias);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename G, typename S, typename D, typename W>
void launch_backward(const BackwardTensors& t) {
  using Arguments = BackwardArguments<G, S, D, W>;
  using A = typename Arguments::A;
  constexpr int N = std::min(kPackSize<S>, kPackSize<G>), K = kBackwardPacks<S> * kPackSize<S> / N;
  const Backward& in = t.inputs;
  Arguments a{static_cast<const G*>(in.grad.const_data_ptr()), static_cast<const S*>(in.saved.const_data_ptr()),
              t.centered && !in.from_output ? data_of<A>(in.mean) : nullptr,
              static_cast<const A*>(in.rstd.const_data_ptr()), data_of<W>(in.weight), data_of<W>(in.bias),
              static_cast<D*>(t.dx.mutable_data_ptr()), nullptr, t.rows.count, t.rows.columns,
              static_cast<A>(in.eps), t.centered, in.from_output};
  const bool packs = a.n % N == 0 && fits<G, N>(a.grad) && fits<S, N>(a.saved) && fits<W, N>(a.weight) &&
                     fits<W, N>(a.bias) && fits<D, N>(a.dx);
  const cudaStream_t stream = current_stream(in.saved);
  const int64_t threads = threads_for(a.n, N * K);
  const bool kept = packs && threads <= kMaxThreads;
  const dim3 block = block_for(kept ? threads : std::min<int64_t>(kMaxThreads, threads_for(a.n, 8)));
  Tensor partial;
  int64_t parts = 0;
  if (t.parameters) {
    // Enough blocks to fill the device; no more than leave each several rows, so that the partial sums stay small.
    const int64_t processors = multiprocessor_count(), filling = processors * (1024 / (block.x * block.y));
    parts = std::min(std::max(t.rows.count / 32, processors), std::max<int64_t>(filling, processors));
    parts = std::max<int64_t>(1, std::min(parts, (t.rows.count + block.y - 1) / block.y));
    // Rows that are not kept are summed by tiles of columns: parts * n, and with it the scratch, stays near what fills it.
    const int64_t tiles = (a.n + 31) / 32, most = std::min<int64_t>(128, t.rows.count / (4 * kTileRows));
    if (!kept) parts = std::clamp<int64_t>(processors * 16 / tiles, 1, std::max<int64_t>(most, 1));
    const std::vector<int64_t> sizes{parts, 2, a.n};
    partial = torch::stable::new_empty(in.rstd, sizes);
    a.partial = static_cast<A*>(partial.mutable_data_ptr());
  }
  if (kept && t.parameters) {
    backward_kernel<G, S, D, W, N, K, true><<<static_cast<unsigned>(parts), block, 0, stream>>>(a);
  } else if (kept) {
    backward_kernel<G, S, D, W, N, K, false><<<grid_for(a.rows, block), block, 0, stream>>>(a);
  } else {
    if (packs) backward_kernel<G, S, D, W, N, 0, false><<<grid_for(a.rows, block), block, 0, stream>>>(a);
    else backward_kernel<G, S, D, W, 1, 0, false><<<grid_for(a.rows, block), block, 0, stream>>>(a);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (t.parameters) {
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>((a.n + 31) / 32, int64_t{1} << 20)),
                      static_cast<unsigned>(parts));
      parameters_kernel<<<grid, dim3(32, kTileRows), 0, stream>>>(a);
    }
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (t.parameters) finish_parameters<A>(t, partial, parts, stream);
}

// The dtypes below are those that csrc/cuda/norm.cu converts to. Parameters of a 16-bit input are in its dtype or float32.
inline bool is_float(const Optional& weight, const Optional& bias) {
  const Optional& parameter = weight.has_value() ? weight : bias;
  return !parameter.has_value() || parameter->scalar_type() == ScalarType::Float;
}

// y is in the dtype of x or of the parameters.
template <typename X>
void forward_of(const ForwardTensors& t) {
  if constexpr (sizeof(X) > 2) {
    launch_forward<X, X, X>(t);
  } else {
    if (!is_float(t.weight, t.bias)) launch_forward<X, X, X>(t);
    else if (t.y.scalar_type() == ScalarType::Float) launch_forward<X, float, float>(t);
    else launch_forward<X, float, X>(t);
  }
}

// grad and saved are both X, both float32 (from a float32 output), or grad alone is float32.
template <typename X>
void backward_of(const BackwardTensors& t) {
  if constexpr (sizeof(X) > 2) {
    launch_backward<X, X, X, X>(t);
  } else {
    if (!is_float(t.inputs.weight, t.inputs.bias)) launch_backward<X, X, X, X>(t);
    else if (t.inputs.saved.scalar_type() == ScalarType::Float) launch_backward<float, float, X, float>(t);
    else if (t.inputs.grad.scalar_type() == ScalarType::Float) launch_backward<float, X, X, float>(t);
    else launch_backward<X, X, X, float>(t);
  }
}

#define APEXFX_INSTANTIATE_NORMS(X)                      \
  template void forward_of<X>(const ForwardTensors& t); \
  template void backward_of<X>(const BackwardTensors& t)

}  // namespace norm
}  // namespace apexfx
