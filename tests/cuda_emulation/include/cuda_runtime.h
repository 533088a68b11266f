// Just enough of CUDA to run the kernels of lists and of norms on a CPU: a block's threads are fibers that take turns at barriers, blocks
// run one after another. Shared memory is static storage. A barrier that only some threads reach aborts; a shuffle is
// one, for the whole block.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CUDART_VERSION 13000

using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulation {

constexpr size_t kStackBytes = 256 * 1024;
inline dim3 thread, block, threads_per_block, blocks;
inline std::vector<ucontext_t> fibers;
inline std::vector<char*> stacks;
inline std::vector<char> finished;
inline ucontext_t scheduler;
inline unsigned current;
inline std::function<void()> kernel;

inline void run_fiber() {
  kernel();
  finished[current] = 1;
  swapcontext(&fibers[current], &scheduler);
}

inline void barrier() {
  const unsigned self = current;
  swapcontext(&fibers[self], &scheduler);
}

// Lets every thread run to its next barrier or its end; returns how many are left.
inline unsigned run_to_barrier(unsigned count) {
  unsigned ended = 0, waiting = 0;
  for (unsigned t = 0; t < count; ++t) {
    if (finished[t]) continue;
    current = t;
    thread = dim3(t % threads_per_block.x, t / threads_per_block.x);
    swapcontext(&scheduler, &fibers[t]);
    if (finished[t]) ++ended;
    else ++waiting;
  }
  if (ended > 0 && waiting > 0) {
    fprintf(stderr, "a barrier was reached by %u threads and missed by %u\n", waiting, ended);
    abort();
  }
  return waiting;
}

template <typename F>
void launch(dim3 grid, dim3 threads, F f) {
  const unsigned count = threads.x * threads.y;
  blocks = grid;
  threads_per_block = threads;
  kernel = f;
  fibers.resize(count);
  while (stacks.size() < count) stacks.push_back(static_cast<char*>(malloc(kStackBytes)));
  for (unsigned b = 0; b < grid.x * grid.y; ++b) {
    block = dim3(b % grid.x, b / grid.x);
    finished.assign(count, 0);
    for (unsigned t = 0; t < count; ++t) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks[t];
      fibers[t].uc_stack.ss_size = kStackBytes;
      fibers[t].uc_link = nullptr;
      makecontext(&fibers[t], run_fiber, 0);
    }
    while (run_to_barrier(count) > 0) {
    }
  }
}

template <typename T>
T shuffled_xor(T value, unsigned lanes) {
  static std::vector<T> values;
  const unsigned self = current;
  values.resize(fibers.size());
  values[self] = value;
  barrier();
  const T other = values[self ^ lanes];
  barrier();
  return other;
}

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::threads_per_block
#define gridDim emulation::blocks
#define __syncthreads emulation::barrier

inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return emulation::shuffled_xor(value, static_cast<unsigned>(lanes));
}
