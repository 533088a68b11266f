// Blocks of elements between any floating dtype and a float scratch buffer that stays in the L1 cache. CPU kernels
// read a block of each operand into scratch (float32 operands are used in place), compute, and write back.
#pragma once

#include "../convert.h"

namespace apexfx {

constexpr int64_t kBlock = 1024;       // elements of scratch per operand: 4 KiB
constexpr int64_t kChunk = 16 * 1024;  // elements per task: fixed, so that partial sums do not depend on the threads

// Element conversions, vectorized for the machine they run on (csrc/cpu/convert.cpp).
void widen(const BFloat16* in, float* out, int64_t n);
void widen(const Half* in, float* out, int64_t n);
void narrow(const float* in, BFloat16* out, int64_t n);
void narrow(const float* in, Half* out, int64_t n);
void divide(const float* in, float* out, float divisor, int64_t n);

// Returns a pointer to `n` floats with the values of `data`, which is `scratch` unless they are float32 already.
const float* load(const void* data, ScalarType dtype, float* scratch, int64_t n);
// Writes `n` floats as `dtype`; does nothing where `values` is the destination itself.
void store(const float* values, void* data, ScalarType dtype, int64_t n);

inline int64_t element_size(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

inline const void* element(const void* data, ScalarType dtype, int64_t i) {
  return static_cast<const char*>(data) + i * element_size(dtype);
}
inline void* element(void* data, ScalarType dtype, int64_t i) {
  return static_cast<char*>(data) + i * element_size(dtype);
}

// One task: `count` elements of tensor `tensor` from `begin`.
struct Chunk {
  int64_t tensor, begin, count;
};

// Cuts the tensors into chunks of at most kChunk elements, in order.
inline std::vector<Chunk> chunks_of(const std::vector<int64_t>& numels) {
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < static_cast<int64_t>(numels.size()); ++t)
    for (int64_t begin = 0; begin < numels[t]; begin += kChunk)
      chunks.push_back({t, begin, std::min(kChunk, numels[t] - begin)});
  return chunks;
}

// Runs f(chunk index) for every chunk on torch's threads; f must not throw. Threads share the elements, not the chunks,
// equally (a model has many tensors of a few elements): task t is the chunks that begin in the t-th kChunk elements.
template <typename F>
inline void for_each_chunk(const std::vector<Chunk>& chunks, F&& f) {
  std::vector<int64_t> first;
  int64_t elements = 0;
  for (size_t i = 0; i < chunks.size(); elements += chunks[i++].count)
    while (static_cast<int64_t>(first.size()) * kChunk <= elements) first.push_back(static_cast<int64_t>(i));
  const int64_t tasks = static_cast<int64_t>(first.size());
  first.push_back(static_cast<int64_t>(chunks.size()));
  torch::stable::parallel_for(0, tasks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = first[begin]; i < first[end]; ++i) f(i);
  });
}

}  // namespace apexfx
