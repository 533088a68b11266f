// cub::BlockReduce for the emulation: thread 0 adds up what all threads left in shared
// memory, in the order of the real one: pairs within a warp, pairs of pairs, then warp after warp.
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
    if (threadIdx.x == 0) {
      for (int width = 1; width < 32; width *= 2)
        for (int t = 0; t < kThreads; t += 2 * width) storage.value[t] = combine(storage.value[t], storage.value[t + width]);
      for (int t = 32; t < kThreads; t += 32) storage.value[0] = combine(storage.value[0], storage.value[t]);
    }
    const T result = storage.value[0];
    __syncthreads();
    return result;
  }

  T Sum(T x) {
    return Reduce(x, [](T a, T b) { return a + b; });
  }
};

}  // namespace cub
