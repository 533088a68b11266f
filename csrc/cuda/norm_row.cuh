// How the kernels of layer norm and RMS norm walk x: [rows, n]; the formulas are in csrc/norm.h.
//
// A row belongs to blockDim.x threads: 4, 8, 16 or 32 lanes of a warp, or several warps. A block works on blockDim.y rows
// side by side. Thread t owns the packs t, t + blockDim.x, ... of the row, a pack being kPack neighbours that move in one
// access. kPacks of them stay in registers as they were stored, so that memory is read once and every read is on its way
// before the first is used. Longer rows are read again from the cache (kPacks = 0), but for the backward of rows that shared
// memory holds (staged_backward_kernel).
#pragma once

#include "../norm.h"
#include "common.cuh"

namespace apexfx {
namespace norm {

constexpr int kMaxThreads = 512;    // a row
constexpr int kBlockThreads = 256;  // unless a single row takes more

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <int N, typename T, typename A>
__device__ __forceinline__ void widen(const Pack<T, N>& pack, A (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = static_cast<A>(pack.value[i]);
}

template <int N, typename T, typename A>
__device__ __forceinline__ void store_pack(T* p, const A (&in)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.value[i] = static_cast<T>(in[i]);
  store(reinterpret_cast<Pack<T, N>*>(p), pack);
}

// A parameter's pack, or `absent` where there is none.
template <int N, typename T, typename A>
__device__ __forceinline__ void load_parameter(const T* p, int64_t column, A absent, A (&out)[N]) {
  if (p) {
    widen(load_pack<N>(p + column), out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = absent;
  }
}

// Adds up `values` over the row's threads; every thread gets the same bits (the partners of a shuffle add the same two
// numbers). `turn` counts the calls: every other one has the same shared memory, so that one barrier each is enough.
template <int N, typename A>
__device__ __forceinline__ void sum_over_row(A (&values)[N], unsigned& turn) {
#pragma unroll
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    if (offset >= blockDim.x) break;
#pragma unroll
    for (int v = 0; v < N; ++v) values[v] += __shfl_xor_sync(0xffffffffu, values[v], offset);
  }
  if (blockDim.x <= 32) return;
  __shared__ A warps[2][kMaxThreads / 32][N];
  const int per_row = blockDim.x / 32, first = threadIdx.y * per_row;
  auto& mine = warps[turn++ % 2];
  if (threadIdx.x % 32 == 0)
    for (int v = 0; v < N; ++v) mine[first + threadIdx.x / 32][v] = values[v];
  __syncthreads();
#pragma unroll
  for (int v = 0; v < N; ++v) values[v] = mine[first][v];
  for (int w = 1; w < per_row; ++w)
#pragma unroll
    for (int v = 0; v < N; ++v) values[v] += mine[first + w][v];
}

}  // namespace norm
}  // namespace apexfx
