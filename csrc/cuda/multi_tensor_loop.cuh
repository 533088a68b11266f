// One kernel over lists of tensors, in few launches: the tensors of a launch travel in the kernel's arguments, blocks take chunks of
// fixed size from a shared numbering, and reductions leave one partial result per chunk, so that results do not depend on
// the number of blocks. Accesses are 16 bytes where every operand of a tensor is aligned.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <map>

#include "../tensor_lists.h"
#include "common.cuh"

namespace apexfx {

constexpr int kThreads = 256;
constexpr int64_t kCudaChunk = 8192;  // elements
#if CUDART_VERSION >= 12010
constexpr int kArgumentBytes = 32764 - 512;  // the kernel-argument limit from CUDA 12.1 on, less room for the functor
#else
constexpr int kArgumentBytes = 4096 - 512;
#endif

// The tensors of one launch; all have the same dtypes. Operand k of tensor t is data[k][t]; absent operands are null.
template <int kOperands>
struct Table {
  static constexpr int kCapacity = (kArgumentBytes - 64) / (8 * kOperands + 8 + 4 + 4);
  void* data[kOperands][kCapacity];
  int64_t numel[kCapacity];
  int32_t chunk_end[kCapacity];  // chunks of this launch up to and including tensor t
  int32_t index[kCapacity];      // the tensor's place in the caller's list
  int64_t first_chunk;           // number of the launch's first chunk among all
  ScalarType dtype[kOperands];
  int count;

  __device__ int find(int chunk) const {  // the tensor that holds a chunk of this launch
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (chunk_end[middle] > chunk) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  __device__ int chunk_begin(int t) const { return t == 0 ? 0 : chunk_end[t - 1]; }
};

// Splits positions into tables: by dtypes, then by what fits one launch. `num_chunks` gets the total.
template <int kOperands>
std::vector<Table<kOperands>> tables_of(const std::vector<Position>& positions, int64_t& num_chunks) {
  std::map<std::vector<int>, std::vector<int>> by_dtype;
  for (size_t i = 0; i < positions.size(); ++i) {
    std::vector<int> key;
    for (int k = 0; k < kOperands; ++k)
      key.push_back(positions[i].data[k] || positions[i].numel == 0 ? static_cast<int>(positions[i].dtype[k]) : -1);
    by_dtype[key].push_back(static_cast<int>(i));
  }
  std::vector<Table<kOperands>> tables;
  num_chunks = 0;
  for (const auto& [key, members] : by_dtype) {
    for (size_t m = 0; m < members.size(); ++m) {
      if (m % Table<kOperands>::kCapacity == 0) {
        tables.emplace_back();
        tables.back().count = 0;
        tables.back().first_chunk = num_chunks;
        for (int k = 0; k < kOperands; ++k) tables.back().dtype[k] = positions[members[m]].dtype[k];
      }
      Table<kOperands>& table = tables.back();
      const Position& position = positions[members[m]];
      const int t = table.count++;
      for (int k = 0; k < kOperands; ++k) table.data[k][t] = position.data[k];
      const int64_t chunks = (position.numel + kCudaChunk - 1) / kCudaChunk;
      const int64_t end = (t == 0 ? 0 : table.chunk_end[t - 1]) + chunks;
      check(end < (int64_t{1} << 31), "multi-tensor launch", "more than 2^31 chunks in one launch");
      table.numel[t] = position.numel;
      table.chunk_end[t] = static_cast<int32_t>(end);
      table.index[t] = members[m];
      num_chunks += chunks;
    }
  }
  return tables;
}

// ---- moving V elements between memory of any dtype and arithmetic of type T -------------------------------------------

template <typename S, typename T, int V>
__device__ __forceinline__ void load_as(const void* data, int64_t i, T (&out)[V]) {
  constexpr int kPer = V < kPackSize<S> ? V : kPackSize<S>;  // elements of one access
#pragma unroll
  for (int j = 0; j < V; j += kPer) {
    const auto pack = *reinterpret_cast<const Pack<S, kPer>*>(static_cast<const S*>(data) + i + j);
#pragma unroll
    for (int k = 0; k < kPer; ++k) out[j + k] = static_cast<T>(pack.value[k]);
  }
}

template <typename S, typename T, int V>
__device__ __forceinline__ void store_as(void* data, int64_t i, const T (&in)[V]) {
  constexpr int kPer = V < kPackSize<S> ? V : kPackSize<S>;
#pragma unroll
  for (int j = 0; j < V; j += kPer) {
    Pack<S, kPer> pack;
#pragma unroll
    for (int k = 0; k < kPer; ++k) pack.value[k] = static_cast<S>(in[j + k]);
    *reinterpret_cast<Pack<S, kPer>*>(static_cast<S*>(data) + i + j) = pack;
  }
}

// kUniform: every operand is of type T. Otherwise the dtype is looked at: a branch all threads of a launch share.
template <bool kUniform, typename T, int V>
__device__ __forceinline__ void load_pack(const void* data, ScalarType dtype, int64_t i, T (&out)[V]) {
  if (kUniform) return load_as<T>(data, i, out);
  switch (dtype) {
    case ScalarType::Half: return load_as<Half>(data, i, out);
    case ScalarType::BFloat16: return load_as<BFloat16>(data, i, out);
    case ScalarType::Double: return load_as<double>(data, i, out);
    default: return load_as<float>(data, i, out);
  }
}

template <bool kUniform, typename T, int V>
__device__ __forceinline__ void store_pack(void* data, ScalarType dtype, int64_t i, const T (&in)[V]) {
  if (kUniform) return store_as<T>(data, i, in);
  switch (dtype) {
    case ScalarType::Half: return store_as<Half>(data, i, in);
    case ScalarType::BFloat16: return store_as<BFloat16>(data, i, in);
    case ScalarType::Double: return store_as<double>(data, i, in);
    default: return store_as<float>(data, i, in);
  }
}

// ---- the kernel ---------------------------------------------------------------------------------------------------------

// What a functor must offer:
//   kOperands, kWritten, kUnread (bit masks), kSums (partial results per chunk: 0, 1 or 2), kMaximum (combine by max),
//   kPerTensor (scalars differ by tensor);  skip();  prepare<T>(table, t) -> the scalars;
//   apply<T>(T (&x)[kOperands], scalars, double (&sums)[...]) on one element of every operand.
struct CombineMax {
  __device__ double operator()(double a, double b) const { return a != a || a > b ? a : b; }  // NaN wins
};
struct CombineSum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

template <typename T, bool kUniform, int V, typename Op>
__device__ __forceinline__ void apply_to_elements(const Table<Op::kOperands>& table, void* const (&data)[Op::kOperands],
                                              int64_t i, const Op& op, const decltype(op.template prepare<T>(table, 0))& s,
                                              double (&sums)[Op::kSums + 1]) {
  constexpr int K = Op::kOperands;
  T x[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (!(Op::kUnread >> k & 1) && data[k] != nullptr) load_pack<kUniform>(data[k], table.dtype[k], i, x[k]);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    T element[K];
#pragma unroll
    for (int k = 0; k < K; ++k) element[k] = x[k][j];
    op.template apply<T>(element, s, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) x[k][j] = element[k];
  }
#pragma unroll
  for (int k = 0; k < K; ++k)
    if ((Op::kWritten >> k & 1) && data[k] != nullptr) store_pack<kUniform>(data[k], table.dtype[k], i, x[k]);
}

template <typename T, bool kUniform, int V, typename Op>
__global__ void __launch_bounds__(kThreads, 2)
    multi_tensor_kernel(const __grid_constant__ Table<Op::kOperands> table, const __grid_constant__ Op op, double* partials) {
  constexpr int K = Op::kOperands;
  [[maybe_unused]] constexpr bool kMaximum = Op::kMaximum;
  if (op.skip()) return;
  using Scalars = decltype(op.template prepare<T>(table, 0));
  __shared__ Scalars shared;
  if (!Op::kPerTensor) {
    if (threadIdx.x == 0) shared = op.template prepare<T>(table, 0);
    __syncthreads();
  }
  const int num_chunks = table.chunk_end[table.count - 1];
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int t = table.find(chunk);
    if (Op::kPerTensor) {
      __syncthreads();  // the previous chunk's scalars are no longer read
      if (threadIdx.x == 0) shared = op.template prepare<T>(table, t);
      __syncthreads();
    }
    const Scalars s = shared;
    void* data[K];
    bool aligned = true;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      data[k] = table.data[k][t];
      aligned = aligned && reinterpret_cast<uintptr_t>(data[k]) % 16 == 0;
    }
    const int64_t begin = static_cast<int64_t>(chunk - table.chunk_begin(t)) * kCudaChunk;
    const int64_t end = begin + kCudaChunk < table.numel[t] ? begin + kCudaChunk : table.numel[t];
    const int64_t packed = aligned ? begin + (end - begin) / V * V : begin;
    double sums[Op::kSums + 1] = {};
    for (int64_t i = begin + threadIdx.x * V; i < packed; i += kThreads * V)
      apply_to_elements<T, kUniform, V>(table, data, i, op, s, sums);
    for (int64_t i = packed + threadIdx.x; i < end; i += kThreads)
      apply_to_elements<T, kUniform, 1>(table, data, i, op, s, sums);
    if constexpr (Op::kSums > 0) {
      using Combine = std::conditional_t<kMaximum, CombineMax, CombineSum>;
      using Reduce = cub::BlockReduce<double, kThreads>;
      __shared__ typename Reduce::TempStorage scratch;
#pragma unroll
      for (int j = 0; j < Op::kSums; ++j) {
        __syncthreads();
        const double total = Reduce(scratch).Reduce(sums[j], Combine{});
        if (threadIdx.x == 0) partials[(table.first_chunk + chunk) * Op::kSums + j] = total;
      }
    }
  }
}

template <typename T, bool kUniform, int V, typename Op>
void launch_multi_tensor(const Table<Op::kOperands>& table, const Op& op, double* partials, cudaStream_t stream) {
  static_assert(sizeof(table) + sizeof(op) + sizeof(partials) <= kArgumentBytes + 512, "kernel arguments too large");
  const int64_t chunks = table.chunk_end[table.count - 1];
  if (chunks == 0) return;
  int per_multiprocessor = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, multi_tensor_kernel<T, kUniform, V, Op>,
                                                               kThreads, 0));
  const int64_t blocks = std::min<int64_t>(chunks, int64_t{multiprocessor_count()} * std::max(per_multiprocessor, 1));
  multi_tensor_kernel<T, kUniform, V, Op><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, op, partials);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Runs `op` over every table, choosing arithmetic and access width from the dtypes of the operands that are there.
template <typename Op>
void multi_tensor_loop(const std::vector<Table<Op::kOperands>>& tables, const Op& op, double* partials, cudaStream_t stream) {
  for (const auto& table : tables) {
    bool any_double = false, all_float = true, all_double = true;
    for (int k = 0; k < Op::kOperands; ++k) {
      bool present = false;
      for (int t = 0; t < table.count; ++t) present = present || table.data[k][t] != nullptr;
      if (!present) continue;
      any_double = any_double || table.dtype[k] == ScalarType::Double;
      all_double = all_double && table.dtype[k] == ScalarType::Double;
      all_float = all_float && table.dtype[k] == ScalarType::Float;
    }
    if (all_float) launch_multi_tensor<float, true, 4>(table, op, partials, stream);
    else if (!any_double) launch_multi_tensor<float, false, 8>(table, op, partials, stream);
    else if (all_double) launch_multi_tensor<double, true, 2>(table, op, partials, stream);
    else launch_multi_tensor<double, false, 2>(table, op, partials, stream);
  }
}

// totals[index * kSums + j] = the tensor's partial results, combined in a fixed order. One block a tensor.
template <int kOperands, int kSums, bool kMaximum>
__global__ void __launch_bounds__(kThreads, 2)
    combine_kernel(const __grid_constant__ Table<kOperands> table, const double* partials, double* totals,
                   const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;  // the step is skipped: there are no partial results
  using Combine = std::conditional_t<kMaximum, CombineMax, CombineSum>;
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const int t = blockIdx.x;
  for (int j = 0; j < kSums; ++j) {
    double total = 0.0;
    for (int chunk = table.chunk_begin(t) + threadIdx.x; chunk < table.chunk_end[t]; chunk += kThreads)
      total = Combine{}(total, partials[(table.first_chunk + chunk) * kSums + j]);
    __syncthreads();
    total = Reduce(scratch).Reduce(total, Combine{});
    if (threadIdx.x == 0) totals[static_cast<int64_t>(table.index[t]) * kSums + j] = total;
  }
}

template <int kSums, bool kMaximum, int kOperands>
void combine(const std::vector<Table<kOperands>>& tables, const double* partials, double* totals, const float* found_inf,
             cudaStream_t stream) {
  for (const auto& table : tables) {
    combine_kernel<kOperands, kSums, kMaximum><<<table.count, kThreads, 0, stream>>>(table, partials, totals, found_inf);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// A double buffer on the tensors' device; at least one element, so that it has an address.
inline Tensor scratch_doubles(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {std::max<int64_t>(count, 1)}, ScalarType::Double);
}

}  // namespace apexfx
