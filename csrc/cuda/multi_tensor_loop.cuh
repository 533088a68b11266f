// One kernel over lists of tensors, in few launches: the tensors of a launch travel in the kernel's arguments, blocks take
// chunks of fixed size from a shared numbering, and reductions leave one partial result per chunk, so that results do not
// depend on the number of blocks.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <map>
#include <tuple>
#include <utility>

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
    for (int k = 0; k < kOperands; ++k) key.push_back(static_cast<int>(positions[i].dtype[k]));
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

// ---- dtypes of a launch ------------------------------------------------------------------------------------------------

// An operand of one of several dtypes, looked at where it is loaded: a branch all threads of a launch share. T: float, or
// double where one of the operands may be float64.
template <typename T>
struct Any {};

// The dtypes of a launch's operands, known when it is compiled, so that all loads are in flight together: a type, Any, or
// void for a list that is absent (or of no interest to the op).
template <typename... S>
struct Operands {
  static constexpr bool kDouble = ((std::is_same_v<S, double> || std::is_same_v<S, Any<double>>) || ...);
  static constexpr bool kAny = (std::is_same_v<S, Any<float>> || ...);
  using T = std::conditional_t<kDouble, double, float>;  // of the arithmetic
  template <int k>
  using At = std::tuple_element_t<k, std::tuple<S...>>;
};

// What an op compiles; the first that fits a table runs.
template <typename... Each>
struct Variants {};

// Of an op that reads one list and writes another.
using CopyDtypes =
    Variants<Operands<float, float>, Operands<Half, Half>, Operands<BFloat16, BFloat16>, Operands<Half, float>,
             Operands<BFloat16, float>, Operands<float, Half>, Operands<float, BFloat16>, Operands<double, double>,
             Operands<Any<float>, Any<float>>, Operands<Any<double>, Any<double>>>;

constexpr ScalarType kAbsent{};  // the dtype of an absent list, see Position

template <typename S>
bool is_dtype(ScalarType dtype) {
  if constexpr (std::is_void_v<S>) return dtype == kAbsent;
  else if constexpr (std::is_same_v<S, Any<double>>) return true;
  else if constexpr (std::is_same_v<S, Any<float>>) return dtype != ScalarType::Double;
  else if constexpr (std::is_same_v<S, Half>) return dtype == ScalarType::Half;
  else if constexpr (std::is_same_v<S, BFloat16>) return dtype == ScalarType::BFloat16;
  else return dtype == (std::is_same_v<S, double> ? ScalarType::Double : ScalarType::Float);
}

template <typename S>
constexpr size_t kBytes = sizeof(S);
template <>
constexpr size_t kBytes<void> = 0;
template <typename T>
constexpr size_t kBytes<Any<T>> = sizeof(T);

// Elements a thread takes at once: 16 bytes of the widest operand.
template <typename... S>
constexpr int pack_size(Operands<S...>) {
  return 16 / std::max({kBytes<S>...});
}

// Calls f(S{}), for Any with the dtype it has.
template <typename S>
struct Dtype {
  template <typename F>
  static __device__ __forceinline__ void with(ScalarType, F&& f) {
    f(S{});
  }
};
template <>
struct Dtype<void> {
  template <typename F>
  static __device__ __forceinline__ void with(ScalarType, F&&) {}
};
template <typename T>
struct Dtype<Any<T>> {
  template <typename F>
  static __device__ __forceinline__ void with(ScalarType dtype, F&& f) {
    if (dtype == ScalarType::Float) f(float{});
    else if (dtype == ScalarType::Half) f(Half{});
    else if (dtype == ScalarType::BFloat16) f(BFloat16{});
    else if constexpr (std::is_same_v<T, double>)
      if (dtype == ScalarType::Double) f(double{});
  }
};

// ---- the kernel ---------------------------------------------------------------------------------------------------------

// What a functor must offer:
//   kOperands, kWritten, kUnread (bit masks), kSums (partial results per chunk: 0, 1 or 2), kMaximum (combine by max);
//   Dtypes (Variants);  skip();  prepare<T>() -> the scalars, once a block;
//   kUnscales: operand 1, the gradient, is also written, divided by the scale, where `op.scalars` (DeviceScalars) says so;
//   for_tensor(scalars, table, t) where kPerTensor: completes them by what differs from tensor to tensor;
//   apply<T>(T (&x)[kOperands], scalars, double (&sums)[...]) on one element of every operand.
struct CombineMax {
  __device__ double operator()(double a, double b) const { return a != a || a > b ? a : b; }  // NaN wins
};
struct CombineSum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

template <typename Op>
constexpr unsigned kTouched = (~Op::kUnread | Op::kWritten) & ((1u << Op::kOperands) - 1);

constexpr int count_bits(unsigned mask) { return mask == 0 ? 0 : (mask & 1) + count_bits(mask >> 1); }

template <typename F, int... k>
__device__ __forceinline__ void for_each_index(std::integer_sequence<int, k...>, F&& f) {
  (f(std::integral_constant<int, k>{}), ...);
}

// Calls f(k, S{}) for every operand k of the mask that is there, S being its dtype.
template <typename Types, unsigned kMask, int K, typename F>
__device__ __forceinline__ void for_each_operand(const ScalarType (&dtype)[K], F&& f) {
  for_each_index(std::make_integer_sequence<int, K>{}, [&](auto k) {
    if constexpr (kMask >> k & 1)
      Dtype<typename Types::template At<k>>::with(dtype[k], [&](auto zero) { f(k, zero); });
  });
}

// Up to 16 bytes of an operand as they lie in memory.
struct alignas(16) Raw {
  unsigned char bytes[16];
  template <typename S, int V>
  __device__ __forceinline__ Pack<S, V>& as() {
    return reinterpret_cast<Pack<S, V>&>(*this);
  }
};

// A thread's V elements lie side by side (kPacked), or kThreads apart where not all operands are aligned: a warp's
// accesses cover neighbours all the same. `left` elements are there from p on.
template <bool kPacked, typename S, int V>
__device__ __forceinline__ void load_elements(const S* p, int64_t left, Pack<S, V>& pack) {
  if constexpr (kPacked) {
    pack = *reinterpret_cast<const Pack<S, V>*>(p);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j * kThreads < left) pack.value[j] = p[j * kThreads];
  }
}

template <bool kPacked, typename S, int V>
__device__ __forceinline__ void store_elements(S* p, int64_t left, const Pack<S, V>& pack) {
  if constexpr (kPacked) {
    store(reinterpret_cast<Pack<S, V>*>(p), pack);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j * kThreads < left) p[j * kThreads] = pack.value[j];
  }
}

template <typename Types, bool kPacked, typename Op, typename Scalars>
__device__ __forceinline__ void apply_to_elements(const Table<Op::kOperands>& table, void* const (&data)[Op::kOperands],
                                                  int64_t begin, int64_t end, const Op& op, const Scalars& s,
                                                  typename Types::T inverse_scale, double (&sums)[Op::kSums + 1]) {
  using T = typename Types::T;
  constexpr int K = Op::kOperands;
  constexpr unsigned kRead = ~Op::kUnread & ((1u << K) - 1);
  constexpr int kReads = count_bits(kRead);
  constexpr int V = kPacked ? pack_size(Types{}) : std::min(pack_size(Types{}), kReads > 2 ? 2 : 4);
  constexpr int kPacks = !kPacked || kReads == 0 || kReads > 2 ? 1 : 4 / kReads;  // so that four loads are in flight
#pragma unroll 1
  for (int64_t first = begin + threadIdx.x * (kPacked ? V : 1); first < end; first += kPacks * V * kThreads) {
    Raw raw[kPacks][K];  // all of it read before any is computed with
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t i = first + u * V * kThreads;
      if (i >= end) continue;
      for_each_operand<Types, kRead>(table.dtype, [&](auto k, auto zero) {
        using S = decltype(zero);
        load_elements<kPacked>(static_cast<const S*>(data[k]) + i, end - i, raw[u][k].template as<S, V>());
      });
    }
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t i = first + u * V * kThreads;
      if (i >= end) continue;
      T x[V][K];
      for_each_operand<Types, kRead>(table.dtype, [&](auto k, auto zero) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[j][k] = static_cast<T>(raw[u][k].template as<decltype(zero), V>().value[j]);
      });
      const auto write = [&](auto k, auto zero, auto&& value) {
        using S = decltype(zero);
        Pack<S, V> pack;
#pragma unroll
        for (int j = 0; j < V; ++j) pack.value[j] = static_cast<S>(value(j));
        store_elements<kPacked>(static_cast<S*>(data[k]) + i, end - i, pack);
      };
      if constexpr (Op::kUnscales)
        if (op.scalars.unscales)
          for_each_operand<Types, 0b10>(table.dtype, [&](auto k, auto zero) {
            write(k, zero, [&](int j) { return x[j][k] * inverse_scale; });
          });
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (kPacked || i + j * kThreads < end) op.template apply<T>(x[j], s, sums);
      for_each_operand<Types, Op::kWritten>(table.dtype, [&](auto k, auto zero) {
        write(k, zero, [&](int j) { return x[j][k]; });
      });
    }
  }
}

// Blocks a multiprocessor: enough loads in flight, and registers enough for what takes more of them.
template <typename Types, typename Op>
constexpr int kBlocks = Types::kDouble || Types::kAny ? 2 : pack_size(Types{}) == 8 || Op::kSums > 1 ? 3 : 4;

template <typename Types, typename Op>
__global__ void __launch_bounds__(kThreads, (kBlocks<Types, Op>))
    multi_tensor_kernel(const __grid_constant__ Table<Op::kOperands> table, const __grid_constant__ Op op, double* partials) {
  constexpr int K = Op::kOperands, V = pack_size(Types{});
  [[maybe_unused]] constexpr bool kMaximum = Op::kMaximum;
  if (op.skip()) return;
  using T = typename Types::T;
  using Scalars = decltype(op.template prepare<T>());
  __shared__ Scalars shared;
  __shared__ T shared_inverse_scale;
  if (threadIdx.x == 0) {
    shared = op.template prepare<T>();
    if constexpr (Op::kUnscales) shared_inverse_scale = static_cast<T>(op.scalars.inverse_scale());
  }
  __syncthreads();
  [[maybe_unused]] int completed = -1;  // the tensor that `shared` is complete for
  const int num_chunks = table.chunk_end[table.count - 1];
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int t = table.find(chunk);
    if constexpr (Op::kPerTensor) {
      if (t != completed) {
        __syncthreads();  // the scalars of the tensor before are no longer read
        if (threadIdx.x == 0) op.for_tensor(shared, table, t);
        __syncthreads();
        completed = t;
      }
    }
    const Scalars s = shared;
    const T inverse_scale = shared_inverse_scale;
    void* data[K];
    bool aligned = true;
    for_each_index(std::make_integer_sequence<int, K>{}, [&](auto k) {
      constexpr size_t kPackBytes = V * kBytes<typename Types::template At<k>>;
      data[k] = table.data[k][t];
      if constexpr (kPackBytes > 0 && (kTouched<Op> >> k & 1))
        aligned = aligned && reinterpret_cast<uintptr_t>(data[k]) % kPackBytes == 0;
    });
    const int64_t begin = static_cast<int64_t>(chunk - table.chunk_begin(t)) * kCudaChunk;
    const int64_t end = begin + kCudaChunk < table.numel[t] ? begin + kCudaChunk : table.numel[t];
    const int64_t packed = aligned ? begin + (end - begin) / V * V : begin;
    double sums[Op::kSums + 1] = {};
    apply_to_elements<Types, true>(table, data, begin, packed, op, s, inverse_scale, sums);
    apply_to_elements<Types, false>(table, data, packed, end, op, s, inverse_scale, sums);
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

// Blocks of a kernel that a multiprocessor holds, times multiprocessors: asked once a process, for the first device.
template <typename Types, typename Op>
int64_t blocks_of_a_wave() {
  static const int64_t blocks = [] {
    int per_multiprocessor = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, multi_tensor_kernel<Types, Op>,
                                                                 kThreads, 0));
    return int64_t{multiprocessor_count()} * std::max(per_multiprocessor, 1);
  }();
  return blocks;
}

template <typename Types, typename Op>
void launch_multi_tensor(const Table<Op::kOperands>& table, const Op& op, double* partials, cudaStream_t stream) {
  static_assert(sizeof(table) + sizeof(op) + sizeof(partials) <= kArgumentBytes + 512, "kernel arguments too large");
  const int64_t chunks = table.chunk_end[table.count - 1];
  if (chunks == 0) return;
  const int64_t blocks = std::min(chunks, blocks_of_a_wave<Types, Op>());
  multi_tensor_kernel<Types, Op><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, op, partials);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// True where a launch for these dtypes may take the table; an operand that the op does not touch may be anything.
template <typename Op, typename... S>
bool fits(const ScalarType* dtype, Operands<S...>) {
  int k = 0;
  return ((!(kTouched<Op> >> k & 1) || is_dtype<S>(dtype[k]) ? ++k : 0) && ...);
}

template <typename Op, typename... Each>
void launch_fitting(const Table<Op::kOperands>& table, const Op& op, double* partials, cudaStream_t stream,
                    Variants<Each...>) {
  const bool launched =
      ((fits<Op>(table.dtype, Each{}) && (launch_multi_tensor<Each>(table, op, partials, stream), true)) || ...);
  check(launched, "multi-tensor launch", "no kernel for these dtypes");
}

// Runs `op` over every table.
template <typename Op>
void multi_tensor_loop(const std::vector<Table<Op::kOperands>>& tables, const Op& op, double* partials, cudaStream_t stream) {
  for (const auto& table : tables) launch_fitting(table, op, partials, stream, typename Op::Dtypes{});
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
