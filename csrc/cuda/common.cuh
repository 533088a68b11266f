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
template <typename V>
__device__ __forceinline__ void store(V* p, const V& value) {
  constexpr size_t kBytes = std::min<size_t>(sizeof(value), 16), kStores = sizeof(value) / kBytes;
  using Word = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;
  Word words[kStores];
  memcpy(words, &value, sizeof(value));
#pragma unroll
  for (size_t i = 0; i < kStores; ++i) __stwb(reinterpret_cast<Word*>(p) + i, words[i]);
}

// A pack that stays in registers as it lies in memory, two elements of 16 bits in each. (Those of an array would have a register
// each, and an instruction more to get there.)
template <typename T, int N>
struct alignas(sizeof(T) * N) PackedWords {
  static constexpr bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  std::conditional_t<kPairs, unsigned, T> words[kPairs ? N / 2 : N];

  PackedWords() = default;

  // Of values in what is computed in.
  __device__ __forceinline__ explicit PackedWords(const Compute<T> (&values)[N]) {
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < N; i += 2) words[i / 2] = pair(values[i], values[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) words[i] = static_cast<T>(values[i]);
    }
  }

  __device__ __forceinline__ Compute<T> operator[](int i) const {
    if constexpr (kPairs) return i % 2 == 0 ? low(words[i / 2]) : high(words[i / 2]);
    else return static_cast<Compute<T>>(words[i]);
  }

 private:
  static constexpr bool kHalf = std::is_same_v<T, Half>;

  template <typename To, typename From>
  static __device__ __forceinline__ To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
  static __device__ __forceinline__ float low(unsigned word) {
#ifdef __CUDA_ARCH__
    if constexpr (kHalf) return __low2float(bits_as<__half2>(word));
#endif
    if constexpr (kHalf) return static_cast<float>(bits_as<Half>(static_cast<unsigned short>(word)));
    return bits_as<float>(word << 16);
  }
  static __device__ __forceinline__ float high(unsigned word) {
#ifdef __CUDA_ARCH__
    if constexpr (kHalf) return __high2float(bits_as<__half2>(word));
#endif
    if constexpr (kHalf) return static_cast<float>(bits_as<Half>(static_cast<unsigned short>(word >> 16)));
    return bits_as<float>(word & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned pair(float low, float high) {
#ifdef __CUDA_ARCH__
    if constexpr (kHalf) return bits_as<unsigned>(__floats2half2_rn(low, high));
    else return bits_as<unsigned>(__floats2bfloat162_rn(low, high));
#else
    return bits_as<unsigned short>(T(low)) | static_cast<unsigned>(bits_as<unsigned short>(T(high))) << 16;
#endif
  }
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

// What a block may have of shared memory, static and dynamic, at most.
inline int shared_bytes_of_a_block() {
  int device = 0, bytes = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

}  // namespace apexfx
