// Just enough of CUDA to run the kernels on a CPU: a block's threads are fibers that take turns at barriers, blocks run one
// after another. Shared memory is static storage, or as much as a launch asks for. A barrier that only some threads reach
// aborts; a shuffle is one, for the whole block.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
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

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

// Three multiprocessors of two blocks: grids have several waves. Shared memory as on an H100.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 3, cudaDevAttrMaxSharedMemoryPerBlockOptin = 227 * 1024 };
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) { return *value = attribute, 0; }
template <typename Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 2, 0;
}

namespace emulation {

constexpr size_t kStackBytes = 256 * 1024, kGuardBytes = 64;

// A copy to shared memory that nobody has waited for yet.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Runs the kernel once for every block it is woken for. (A jump costs a hundredth of a swapcontext, which asks the
// kernel for the signal mask; the context only starts the fiber on its stack.)
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t start;
  jmp_buf position;
  bool started = false, finished = true;
  std::deque<std::vector<Copy>> copies;  // groups; the last one is open
};

inline dim3 thread, block, threads_per_block, blocks;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline jmp_buf scheduler;
inline unsigned current;
inline std::function<void()> kernel;
inline std::vector<uint4> dynamic_shared;                // of a block, and a guard
inline std::map<const void*, size_t> most_dynamic_shared;  // of a kernel that asked for more than any may have

inline void barrier() {
  if (_setjmp(fibers[current]->position) == 0) _longjmp(scheduler, 1);
}

inline void run_fiber() {
  for (;;) {
    kernel();
    fibers[current]->finished = true;
    barrier();
  }
}

inline void wake(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.position, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStackBytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_fiber, 0);
  setcontext(&fiber.start);
}

// Lets every thread run to its next barrier or its end; returns how many are left.
inline unsigned run_to_barrier(unsigned count) {
  unsigned ended = 0, waiting = 0;
  for (unsigned t = 0; t < count; ++t) {
    if (fibers[t]->finished) continue;
    current = t;
    thread = dim3(t % threads_per_block.x, t / threads_per_block.x);
    wake(*fibers[t]);
    if (fibers[t]->finished) ++ended;
    else ++waiting;
  }
  if (ended > 0 && waiting > 0) {
    fprintf(stderr, "a barrier was reached by %u threads and missed by %u\n", waiting, ended);
    abort();
  }
  return waiting;
}

template <typename Kernel, typename F>
void launch(Kernel* function, dim3 grid, dim3 threads, size_t shared_bytes, F f) {
  const unsigned count = threads.x * threads.y;
  const size_t most = std::max<size_t>(48 * 1024, most_dynamic_shared[reinterpret_cast<const void*>(function)]);
  if (count > 1024 || grid.x == 0 || grid.y == 0 || grid.y > 65535 || shared_bytes > most) {
    fprintf(stderr, "%u x %u blocks of %u threads and %zu bytes of shared memory cannot be launched\n", grid.x, grid.y, count,
            shared_bytes);
    abort();
  }
  dynamic_shared.resize((shared_bytes + kGuardBytes) / sizeof(uint4) + 1);
  char* const guard = reinterpret_cast<char*>(dynamic_shared.data()) + shared_bytes;
  blocks = grid;
  threads_per_block = threads;
  kernel = f;
  while (fibers.size() < count) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block = dim3(x, y);
      memset(dynamic_shared.data(), 0xff, shared_bytes + kGuardBytes);  // NaN, whatever floating type reads it
      for (unsigned t = 0; t < count; ++t) {
        fibers[t]->finished = false;
        fibers[t]->copies.assign(1, {});
      }
      while (run_to_barrier(count) > 0) {
      }
      if (std::count(guard, guard + kGuardBytes, '\xff') != kGuardBytes) {
        fprintf(stderr, "a block wrote behind its %zu bytes of shared memory\n", shared_bytes);
        abort();
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

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
int cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  emulation::most_dynamic_shared[reinterpret_cast<const void*>(kernel)] = bytes;
  return 0;
}

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::threads_per_block
#define gridDim emulation::blocks
#define __syncthreads emulation::barrier

using std::isfinite;

template <typename T>
void __stwb(T* p, T value) {
  *p = value;
}
template <typename T>
void atomicAdd(T* p, T value) {
  *p += value;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return emulation::shuffled_xor(value, static_cast<unsigned>(lanes));
}
