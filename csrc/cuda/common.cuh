// What every CUDA op shares: the current stream, the device guard, vector loads and the launch check.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstring>

#include "../common.h"

namespace apexfx {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// `N` elements that move together.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

// Stores of 16 bytes, or one of fewer. (An assignment comes apart into its elements where the compiler cannot see that
// the address is aligned.)
template <typename T, int N>
__device__ __forceinline__ void store(Pack<T, N>* p, const Pack<T, N>& value) {
  constexpr size_t kBytes = std::min<size_t>(sizeof(value), 16), kStores = sizeof(value) / kBytes;
  using Word = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;
  Word words[kStores];
  memcpy(words, &value, sizeof(value));
#pragma unroll
  for (size_t i = 0; i < kStores; ++i) __stwb(reinterpret_cast<Word*>(p) + i, words[i]);
}

template <typename T>
constexpr int kPackSize = 16 / sizeof(T);

inline bool is_aligned(const void* pointer, size_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline int multiprocessor_count() {
  int device = 0, count = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// What a block may have of shared memory, static and dynamic, at most.
inline int shared_bytes_of_a_block() {
  int device = 0, bytes = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

}  // namespace apexfx
