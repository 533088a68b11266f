// What every CUDA op shares: the current stream, the device guard, vector loads and the launch check.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../common.h"

namespace apexfx {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// `N` elements that move as one access of at most 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

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

}  // namespace apexfx
