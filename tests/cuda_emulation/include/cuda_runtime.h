// Just enough of CUDA to run the list kernels on a CPU: a block's threads are fibers that take turns at barriers, blocks
// run one after another. Shared memory is static storage. A barrier that only some threads reach aborts.
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

namespace emulation {

struct Index {
  unsigned x = 0;
};

constexpr size_t kStackBytes = 256 * 1024;
inline Index thread, block, threads_per_block, blocks;
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
    thread.x = t;
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
void launch(unsigned grid, unsigned count, F f) {
  blocks.x = grid;
  threads_per_block.x = count;
  kernel = f;
  fibers.resize(count);
  while (stacks.size() < count) stacks.push_back(static_cast<char*>(malloc(kStackBytes)));
  for (block.x = 0; block.x < grid; ++block.x) {
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

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::threads_per_block
#define gridDim emulation::blocks
#define __syncthreads emulation::barrier

inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
