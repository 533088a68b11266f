// cub::BlockReduce for the emulation: thread 0 folds what all threads left in shared memory.
#pragma once

#include <cuda_runtime.h>

namespace cub {

template <typename T, int kThreads>
struct BlockReduce {
  struct TempStorage {
    T value[kThreads];
  };
  TempStorage& storage;
  explicit BlockReduce(TempStorage& temporary) : storage(temporary) {}

  template <typename Operator>
  T Reduce(T x, Operator combine) {
    storage.value[threadIdx.x] = x;
    __syncthreads();
    T result = storage.value[0];
    if (threadIdx.x == 0)
      for (int t = 1; t < kThreads; ++t) result = combine(result, storage.value[t]);
    __syncthreads();
    return result;
  }

  T Sum(T x) {
    return Reduce(x, [](T a, T b) { return a + b; });
  }
};

}  // namespace cub
