// checksum on CUDA; see csrc/checksum.h. Integer sums do not depend on their order, so blocks add to the totals by atomics.
#include "../checksum.h"

#include "multi_tensor_loop.cuh"

namespace apexfx {
namespace {

using Sum = unsigned long long;  // what atomicAdd takes

struct Add {
  __device__ Sum operator()(Sum a, Sum b) const { return a + b; }
};

constexpr int kBlocksHeld = 4;  // by a multiprocessor

// totals[index of the tensor] += what csrc/checksum.h says, the tensors of a table having elements of T
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksHeld)
    checksum_kernel(const __grid_constant__ Table<1> table, Sum* __restrict__ totals) {
  constexpr int V = kPackSize<T>, kPacks = sizeof(T) == 1 ? 2 : 4;  // loads in flight, as many as registers hold
  using Reduce = cub::BlockReduce<Sum, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const int num_chunks = table.chunk_end[table.count - 1];
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int t = table.find(chunk);
    const T* data = static_cast<const T*>(table.data[0][t]);
    const int64_t begin = static_cast<int64_t>(chunk - table.chunk_begin(t)) * kCudaChunk;
    const int64_t end = begin + kCudaChunk < table.numel[t] ? begin + kCudaChunk : table.numel[t];
    const bool aligned = reinterpret_cast<uintptr_t>(data) % sizeof(Pack<T, V>) == 0;
    const int64_t packed = aligned ? begin + (end - begin) / V * V : begin;
    WordSum sum;
#pragma unroll 1
    for (int64_t first = begin + threadIdx.x * V; first < packed; first += kPacks * V * kThreads) {
      Pack<T, V> pack[kPacks] = {};  // zeros add nothing
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        if (first + u * V * kThreads < packed) pack[u] = *reinterpret_cast<const Pack<T, V>*>(data + first + u * V * kThreads);
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
#pragma unroll
        for (int j = 0; j < V; ++j) sum.add(pack[u].value[j]);
    }
#pragma unroll 4
    for (int64_t i = packed + threadIdx.x; i < end; i += kThreads) sum.add(data[i]);
    __syncthreads();  // the scratch of the chunk before is no longer read
    const Sum total = Reduce(scratch).Reduce(sum.total(), Add{});
    if (threadIdx.x == 0) atomicAdd(&totals[table.index[t]], total);
  }
}

struct Cuda {
  static void add(const std::vector<Position>& positions, const Tensor& sums) {
    const DeviceGuard guard(sums.get_device_index());
    const cudaStream_t stream = current_stream(sums);
    Sum* totals = static_cast<Sum*>(sums.data_ptr());
    int64_t num_chunks = 0;
    for (const Table<1>& table : tables_of<1>(positions, num_chunks)) {
      const int64_t blocks = std::min<int64_t>(table.chunk_end[table.count - 1], int64_t{multiprocessor_count()} * kBlocksHeld);
      if (blocks == 0) continue;
      dispatch_word(table.dtype[0], [&](auto zero) {
        using T = decltype(zero);
        checksum_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, totals);
      });
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) { m.impl("checksum", TORCH_BOX(&checksum<Cuda>)); }

}  // namespace apexfx
