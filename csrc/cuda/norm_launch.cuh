// Chooses the shape of a launch of the kernels in norm_forward.cuh and norm_backward.cuh; instantiated once for each input
// dtype (norm_*.cu).
#pragma once

#include "norm_backward.cuh"
#include "norm_cuda.h"
#include "norm_forward.cuh"

namespace apexfx {
namespace norm {

// Columns a thread keeps: as many as registers hold without spilling. The backward keeps two values and two sums each, and
// the two values of the next row.
template <typename T>
constexpr int kForwardColumns = sizeof(T) == 8 ? 8 : sizeof(T) == 4 ? 24 : 32;
template <typename T>
constexpr int kBackwardColumns = sizeof(T) == 8 ? 4 : 16;
constexpr int kStagedColumns = 32;  // of the backward, where shared memory holds the values, for the two sums of each
constexpr int kSingleColumns = 16;  // of the forward, where a pack is one element

// Threads for a row of n columns: a power of two of at least four, or whole warps. More than kMaxThreads where the row
// cannot be kept.
inline int64_t threads_for(int64_t n, int64_t columns_per_thread) {
  const int64_t least = (n + columns_per_thread - 1) / columns_per_thread;
  if (least > 16) return (least + 31) / 32 * 32;
  return least <= 4 ? 4 : least <= 8 ? 8 : 16;
}

inline dim3 block_for(int64_t threads) {
  return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(std::max<int64_t>(1, kBlockThreads / threads)));
}

inline unsigned grid_for(int64_t rows, dim3 block) {
  return static_cast<unsigned>(std::min<int64_t>((rows + block.y - 1) / block.y, int64_t{1} << 30));
}

// Blocks of a kernel that fill the device.
template <typename Kernel>
int64_t blocks_of_a_wave(Kernel kernel, dim3 block, size_t shared_bytes = 0) {
  int per_multiprocessor = 0;
  STD_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, block.x * block.y, shared_bytes));
  return int64_t{multiprocessor_count()} * std::max(per_multiprocessor, 1);
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
  const ForwardArguments<X, W, Y> a{static_cast<const X*>(t.x.const_data_ptr()), data_of<W>(t.weight), data_of<W>(t.bias),
                                    static_cast<Y*>(t.y.mutable_data_ptr()),
                                    t.centered ? static_cast<A*>(t.mean.mutable_data_ptr()) : nullptr,
                                    static_cast<A*>(t.rstd.mutable_data_ptr()), t.rows.count, t.rows.columns,
                                    static_cast<A>(t.eps)};
  const bool packs = a.n % N == 0 && fits<X, N>(a.x) && fits<W, N>(a.weight) && fits<W, N>(a.bias) && fits<Y, N>(a.y);
  const cudaStream_t stream = current_stream(t.x);
  const int64_t threads = threads_for(a.n, packs ? kForwardColumns<X> : kSingleColumns);
  const dim3 block = block_for(std::min<int64_t>(threads, kMaxThreads));
  const unsigned grid = grid_for(a.rows, block);
  if (threads > kMaxThreads) {
    if (packs) forward_kernel<X, W, Y, N, 0><<<grid, block, 0, stream>>>(a);
    else forward_kernel<X, W, Y, 1, 0><<<grid, block, 0, stream>>>(a);
  } else {
    if (packs) forward_kernel<X, W, Y, N, kForwardColumns<X> / N><<<grid, block, 0, stream>>>(a);
    else forward_kernel<X, W, Y, 1, kSingleColumns><<<grid, block, 0, stream>>>(a);
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

// Rows that are kept. Enough blocks to fill the device; where there are partial sums, no more than leave each several rows,
// so that they stay small.
template <typename G, typename S, typename D, typename W, int kPack, bool kFromOutput, bool kParameters>
void launch_kept_backward(const BackwardTensors& t, BackwardArguments<G, S, D, W> a, int64_t threads, cudaStream_t stream) {
  using A = Compute<S>;
  constexpr auto kernel = backward_kernel<G, S, D, W, kPack, kBackwardColumns<S> / kPack, kFromOutput, kParameters>;
  const dim3 block = block_for(threads);
  int64_t blocks = std::min((a.rows + block.y - 1) / block.y, blocks_of_a_wave(kernel, block));
  Tensor partial;
  if (kParameters) {
    blocks = std::min(blocks, std::max<int64_t>(a.rows / 32, multiprocessor_count()));
    partial = torch::stable::new_empty(t.inputs.rstd, std::vector<int64_t>{blocks, 2, a.n});
    a.partial = static_cast<A*>(partial.mutable_data_ptr());
  }
  kernel<<<static_cast<unsigned>(blocks), block, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (kParameters) finish_parameters<A>(t, partial, blocks, stream);
}

// Rows that are kept in shared memory, with the parameters' sums; false where a row is too long, or the device has too little.
template <typename G, typename S, typename D, typename W, int kPack>
bool launch_staged_backward(const BackwardTensors& t, BackwardArguments<G, S, D, W> a, cudaStream_t stream) {
  using A = Compute<S>;
  constexpr int kPacks = kStagedColumns / kPack;
  constexpr auto kernel = staged_backward_kernel<G, S, D, W, kPack, kPacks>;
  const int64_t threads = threads_for(a.n, kStagedColumns);
  const int bytes = static_cast<int>(2 * kPacks * threads * (sizeof(Pack<G, kPack>) + sizeof(Pack<S, kPack>)));
  const int most = shared_bytes_of_a_block() - 1024;  // less what the kernel has of static shared memory
  if (threads > kMaxThreads || bytes > most) return false;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  const int64_t blocks = std::min(a.rows, blocks_of_a_wave(kernel, dim3(static_cast<unsigned>(threads)), bytes));
  const Tensor partial = torch::stable::new_empty(t.inputs.rstd, std::vector<int64_t>{blocks, 2, a.n});
  a.partial = static_cast<A*>(partial.mutable_data_ptr());
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), bytes, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_parameters<A>(t, partial, blocks, stream);
  return true;
}

// Rows that are not, whose partial sums take a kernel of their own, by tiles of columns: blocks * n, and with it the
// scratch, stays near what fills the device.
template <typename G, typename S, typename D, typename W, int kPack, bool kFromOutput>
void launch_wide_backward(const BackwardTensors& t, BackwardArguments<G, S, D, W> a, cudaStream_t stream) {
  using A = Compute<S>;
  if constexpr (kPack > 1 && sizeof(A) == 4 && !kFromOutput)  // whose division leaves no registers for it
    if (t.parameters && launch_staged_backward<G, S, D, W, kPack>(t, a, stream)) return;
  const unsigned grid = grid_for(a.rows, dim3(kMaxThreads));
  wide_backward_kernel<G, S, D, W, kPack, kFromOutput><<<grid, kMaxThreads, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (!t.parameters) return;
  const int64_t tiles = (a.n + 31) / 32, most = std::min<int64_t>(128, a.rows / (4 * kTileRows));
  const int64_t parts = std::clamp<int64_t>(int64_t{multiprocessor_count()} * 16 / tiles, 1, std::max<int64_t>(most, 1));
  const Tensor partial = torch::stable::new_empty(t.inputs.rstd, std::vector<int64_t>{parts, 2, a.n});
  a.partial = static_cast<A*>(partial.mutable_data_ptr());
  const dim3 tile_grid(static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{1} << 20)), static_cast<unsigned>(parts));
  parameters_kernel<G, S, D, W, kFromOutput><<<tile_grid, dim3(32, kTileRows), 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_parameters<A>(t, partial, parts, stream);
}

template <typename G, typename S, typename D, typename W, bool kFromOutput>
void launch_backward(const BackwardTensors& t) {
  using A = Compute<S>;
  constexpr int N = std::min(kPackSize<S>, kPackSize<G>);
  const Backward& in = t.inputs;
  const BackwardArguments<G, S, D, W> a{
      static_cast<const G*>(in.grad.const_data_ptr()), static_cast<const S*>(in.saved.const_data_ptr()),
      t.centered && !kFromOutput ? data_of<A>(in.mean) : nullptr, static_cast<const A*>(in.rstd.const_data_ptr()),
      data_of<W>(in.weight), data_of<W>(in.bias), static_cast<D*>(t.dx.mutable_data_ptr()), nullptr,
      t.rows.count, t.rows.columns, static_cast<A>(in.eps), t.centered};
  const bool packs = a.n % N == 0 && fits<G, N>(a.grad) && fits<S, N>(a.saved) && fits<W, N>(a.weight) &&
                     fits<W, N>(a.bias) && fits<D, N>(a.dx);
  const cudaStream_t stream = current_stream(in.saved);
  const int64_t threads = threads_for(a.n, kBackwardColumns<S>);
  if (threads > kMaxThreads) {
    if (packs) launch_wide_backward<G, S, D, W, N, kFromOutput>(t, a, stream);
    else launch_wide_backward<G, S, D, W, 1, kFromOutput>(t, a, stream);
  } else if (t.parameters) {
    if (packs) launch_kept_backward<G, S, D, W, N, kFromOutput, true>(t, a, threads, stream);
    else launch_kept_backward<G, S, D, W, 1, kFromOutput, true>(t, a, threads, stream);
  } else {
    if (packs) launch_kept_backward<G, S, D, W, N, kFromOutput, false>(t, a, threads, stream);
    else launch_kept_backward<G, S, D, W, 1, kFromOutput, false>(t, a, threads, stream);
  }
}

template <typename G, typename S, typename D, typename W>
void launch_backward(const BackwardTensors& t) {
  if (t.inputs.from_output) launch_backward<G, S, D, W, true>(t);
  else launch_backward<G, S, D, W, false>(t);
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
