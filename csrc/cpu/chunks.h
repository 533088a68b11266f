// Tensors cut into chunks, and their walk on torch's threads.
#pragma once

#include <atomic>

#include "../common.h"

namespace apexfx {

constexpr int64_t kChunk = 16 * 1024;  // elements: fixed, so that partial sums do not depend on the threads

// `count` elements of tensor `tensor` from `begin`.
struct Chunk {
  int64_t tensor, begin, count;
};

// Cuts the tensors into chunks of at most kChunk elements, in order.
inline std::vector<Chunk> chunks_of(const std::vector<int64_t>& numels) {
  size_t number = 0;
  for (int64_t numel : numels) number += static_cast<size_t>((numel + kChunk - 1) / kChunk);
  std::vector<Chunk> chunks;
  chunks.reserve(number);
  for (int64_t t = 0; t < static_cast<int64_t>(numels.size()); ++t)
    for (int64_t begin = 0; begin < numels[t]; begin += kChunk)
      chunks.push_back({t, begin, std::min(kChunk, numels[t] - begin)});
  return chunks;
}

// A range of chunks that its own thread takes from the front and, when theirs are done, others from the back: memory is
// walked in order, and a thread that the machine holds up does not hold up the rest.
class alignas(64) Share {
 public:
  void set(uint64_t begin, uint64_t end) { range_.store(begin << 32 | end, std::memory_order_relaxed); }

  // Calls f(chunk index) for what is left.
  template <typename F>
  void drain(bool from_front, F&& f) {
    uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = range >> 32, end = range & 0xffffffff;
      if (begin >= end) return;
      const uint64_t rest = from_front ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
      if (!range_.compare_exchange_weak(range, rest, std::memory_order_relaxed)) continue;
      f(static_cast<int64_t>(from_front ? begin : end - 1));
      range = range_.load(std::memory_order_relaxed);
    }
  }

 private:
  std::atomic<uint64_t> range_{0};  // first chunk << 32 | one past the last
};

// Runs f(chunk index) for every chunk on torch's threads; f must not throw. Threads start with equal numbers of elements,
// not of chunks (a model has many tensors of a few elements).
template <typename F>
inline void for_each_chunk(const std::vector<Chunk>& chunks, F&& f) {
  int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.count;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t count = std::clamp<int64_t>(elements / (2 * kChunk), 1, threads);
  std::vector<Share> shares(count);
  size_t end = 0;
  int64_t before = 0;
  for (int64_t s = 0; s < count; ++s) {
    const size_t begin = end;
    while (end < chunks.size() && (s + 1 == count || before * count < (s + 1) * elements)) before += chunks[end++].count;
    shares[s].set(begin, end);
  }
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) shares[s].drain(true, f);
    for (int64_t s = last; s < first + count; ++s) shares[s % count].drain(false, f);
  });
}

}  // namespace apexfx
