// Goes through the positions of TensorLists block by block on torch's threads, handing every kernel plain float (or, for
// float64 tensors, double) pointers.
#pragma once

#include "../tensor_lists.h"
#include "chunks.h"
#include "vector.h"

namespace apexfx {

class MultiTensorLoop {
 public:
  explicit MultiTensorLoop(TensorLists& lists) : positions_(lists.positions()), chunks_(numels_of(positions_)) {}

  const Chunks& chunks() const { return chunks_; }

  // Calls f(chunk, values, n) for every block of every chunk; values[k] are the elements of operand k < N (nullptr
  // where absent). Operands in the bit mask `written` are stored afterwards, those in `unread` are not loaded.
  // Positions that need no conversion come a whole chunk at a time where kWhole (an f that reads its operands once);
  // float64 ones always do. f must not throw.
  template <int N, bool kWhole = false, typename F>
  void run(unsigned written, unsigned unread, F&& f) const {
    chunks_.for_each([&](const Chunk& chunk) {
      const Position& position = positions_[chunk.tensor];
      if (position.dtype[0] == ScalarType::Double) run_double<N>(position, chunk, f);
      else run_float<N, kWhole>(position, chunk, written, unread, f);
    });
  }

 private:
  static std::vector<int64_t> numels_of(const std::vector<Position>& positions) {
    std::vector<int64_t> numels;
    numels.reserve(positions.size());
    for (const Position& position : positions) numels.push_back(position.numel);
    return numels;
  }

  template <int N, typename F>
  static void run_double(const Position& position, const Chunk& chunk, F&& f) {
    double* values[N];
    for (int k = 0; k < N; ++k)
      values[k] = position.data[k] ? static_cast<double*>(position.data[k]) + chunk.begin : nullptr;
    f(chunk, values, chunk.count);
  }

  template <int N, bool kWhole, typename F>
  static void run_float(const Position& position, const Chunk& chunk, unsigned written, unsigned unread, F&& f) {
    alignas(64) float scratch[N][kBlock];
    bool plain = kWhole;
    for (int k = 0; k < N; ++k)
      plain = plain && (position.data[k] == nullptr || position.dtype[k] == ScalarType::Float);
    const int64_t block = plain ? kChunk : kBlock, end = chunk.begin + chunk.count;
    for (int64_t begin = chunk.begin; begin < end; begin += block) {
      const int64_t n = std::min(block, end - begin);
      float* values[N];
      for (int k = 0; k < N; ++k) {
        values[k] = nullptr;
        if (position.data[k] == nullptr) continue;
        void* place = element(position.data[k], position.dtype[k], begin);
        if (position.dtype[k] == ScalarType::Float) values[k] = static_cast<float*>(place);
        else if (unread >> k & 1) values[k] = scratch[k];
        else values[k] = const_cast<float*>(load(place, position.dtype[k], scratch[k], n));
      }
      f(chunk, values, n);
      for (int k = 0; k < N; ++k)
        if ((written >> k & 1) && values[k] != nullptr)
          store(values[k], element(position.data[k], position.dtype[k], begin), position.dtype[k], n);
    }
  }

  std::vector<Position> positions_;
  Chunks chunks_;
};

}  // namespace apexfx
