// How the kernels of layer norm and RMS norm walk x: [rows, n]; the formulas are in csrc/norm.h.
//
// A row belongs to blockDim.x threads, a warp or several, and a block works on blockDim.y rows side by side. Thread t
// owns the packs t, t + blockDim.x, ... of the row, a pack being kPack neighbours that move in one access; up to kPacks
// of them stay in registers, so that memory is read once. Longer rows are read again from the cache (kPacks = 0).
#pragma once

#include "../norm.h"
#include "common.cuh"

namespace apexfx {
namespace norm {

constexpr int kMaxThreads = 512;  // a row

template <int N, typename T, typename A>
__device__ __forceinline__ void load_pack(const T* p, A (&out)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(p);
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
    load_pack(p + column, out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = absent;
  }
}

template <typename A>
__device__ __forceinline__ A shuffled(A value, int offset) {
  return __shfl_xor_sync(0xffffffffu, value, offset);
}
template <typename A>
__device__ __forceinline__ Moments<A> shuffled(const Moments<A>& v, int offset) {
  return {shuffled(v.count, offset), shuffled(v.mean, offset), shuffled(v.m2, offset)};
}
template <typename A>
struct Pair {
  A first, second;
};
template <typename A>
__device__ __forceinline__ Pair<A> shuffled(const Pair<A>& v, int offset) {
  return {shuffled(v.first, offset), shuffled(v.second, offset)};
}
template <typename A>
__device__ __forceinline__ Pair<A> merged(const Pair<A>& a, const Pair<A>& b) {
  return {a.first + b.first, a.second + b.second};
}

// Merges `value` over the row's threads; every thread gets the result. Both partners of a shuffle must compute the
// same bits, so the lower lane's value is always the first operand.
template <typename V>
__device__ __forceinline__ V merged_over_row(V value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const V other = shuffled(value, offset);
    value = threadIdx.x & offset ? merged(other, value) : merged(value, other);
  }
  if (blockDim.x > 32) {
    __shared__ V warps[kMaxThreads / 32];
    const int per_row = blockDim.x / 32, first = threadIdx.y * per_row;
    __syncthreads();  // the rows before may still be read
    if (threadIdx.x % 32 == 0) warps[first + threadIdx.x / 32] = value;
    __syncthreads();
    value = warps[first];
    for (int w = 1; w < per_row; ++w) value = merged(value, warps[first + w]);
  }
  return value;
}

// Moments of the first `count` packs: their mean (zero where it is not wanted), then the squared deviations from it.
template <int N, int kPacks, typename A>
__device__ __forceinline__ Moments<A> moments_of(const A (&x)[kPacks][N], int count, bool centered) {
  A sum = 0, m2 = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
#pragma unroll
    for (int i = 0; i < N; ++i) sum += p < count ? x[p][i] : A(0);
  const A mean = centered && count ? sum / static_cast<A>(count * N) : A(0);
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
#pragma unroll
    for (int i = 0; i < N; ++i) m2 += p < count ? (x[p][i] - mean) * (x[p][i] - mean) : A(0);
  return {static_cast<A>(count * N), mean, m2};
}

}  // namespace norm
}  // namespace apexfx
