// Tensors cut into chunks, which torch's threads share.
#pragma once

#include <atomic>

#include "../common.h"

namespace apexfx {

constexpr int64_t kChunk = 16 * 1024;  // elements: fixed, so that partial sums do not depend on the threads

// `count` elements of tensor `tensor` from `begin`; `index` counts the chunks of all tensors.
struct Chunk {
  int64_t index, tensor, begin, count;
};

// A range of chunks that its own thread takes from the front and, when theirs are done, others from the back: memory is
// walked in order, and a thread that the machine holds up does not hold up the rest.
class alignas(64) Share {
 public:
  void set(uint64_t begin, uint64_t end) { range_.store(begin << 32 | end, std::memory_order_relaxed); }

  // Takes a chunk of those left; -1 where none is.
  int64_t take(bool from_front) {
    uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = range >> 32, end = range & 0xffffffff;
      if (begin >= end) return -1;
      const uint64_t rest = from_front ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
      if (range_.compare_exchange_weak(range, rest, std::memory_order_relaxed))
        return static_cast<int64_t>(from_front ? begin : end - 1);
    }
  }

 private:
  std::atomic<uint64_t> range_{0};  // first chunk << 32 | one past the last
};

// The chunks, of at most kChunk elements, of tensors with `numels` elements.
class Chunks {
 public:
  explicit Chunks(std::vector<int64_t> numels) : numels_(std::move(numels)) {
    first_.reserve(numels_.size() + 1);
    first_.push_back(0);
    for (int64_t numel : numels_) {
      first_.push_back(first_.back() + (numel + kChunk - 1) / kChunk);
      elements_ += numel;
    }
  }

  int64_t size() const { return first_.back(); }
  int64_t tensors() const { return static_cast<int64_t>(numels_.size()); }
  int64_t first_of(int64_t tensor) const { return first_[tensor]; }

  // Runs f(chunk) for every chunk on torch's threads; f must not throw. Threads start with equal numbers of elements,
  // not of chunks (a model has many tensors of a few elements).
  template <typename F>
  void for_each(F&& f) const {
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t count = std::clamp<int64_t>(elements_ / (2 * kChunk), 1, threads);
    std::vector<Share> shares(count);
    share_out(shares);
    torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) drain(shares[s], true, f);
      for (int64_t s = last; s < first + count; ++s) drain(shares[s % count], false, f);
    });
  }

 private:
  void share_out(std::vector<Share>& shares) const {
    const int64_t count = static_cast<int64_t>(shares.size());
    int64_t tensor = 0, before = 0, begin = 0;  // `before`: elements of the tensors passed
    for (int64_t s = 1; s <= count; ++s) {
      const int64_t target = elements_ / count * s;
      while (tensor < tensors() && before + numels_[tensor] <= target) before += numels_[tensor++];
      const int64_t end = s == count ? size() : first_[tensor] + (target - before) / kChunk;
      shares[s - 1].set(begin, end);
      begin = end;
    }
  }

  template <typename F>
  void drain(Share& share, bool from_front, F&& f) const {
    int64_t tensor = -1;
    for (int64_t i = share.take(from_front); i >= 0; i = share.take(from_front)) {
      if (tensor < 0) tensor = std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1;
      while (i >= first_[tensor + 1]) ++tensor;
      while (i < first_[tensor]) --tensor;
      const int64_t begin = (i - first_[tensor]) * kChunk;
      f(Chunk{i, tensor, begin, std::min(kChunk, numels_[tensor] - begin)});
    }
  }

  std::vector<int64_t> numels_, first_;  // first_[t]: the index of tensor t's first chunk
  int64_t elements_ = 0;
};

}  // namespace apexfx
