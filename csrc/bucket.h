// The checks of flatten_bucket and unflatten_bucket, the same for both devices.
#pragma once

#include <cmath>
#include <numeric>

#include "common.h"

namespace apexfx {

// Slots in order of offset: indices into `offsets`. Throws unless they are disjoint and inside [0, numel).
inline std::vector<int64_t> sorted_slots(const char* op, const std::vector<int64_t>& offsets,
                                         const std::vector<int64_t>& numels, int64_t numel, double divisor) {
  check(offsets.size() == numels.size(), op, numels.size(), " tensors but ", offsets.size(), " offsets");
  check(std::isfinite(divisor) && divisor != 0, op, "divisor is ", divisor, "; expected a finite number other than 0");
  check(numel >= 0, op, "numel is ", numel, "; expected zero or more");
  std::vector<int64_t> order(offsets.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::make_pair(offsets[a], numels[a]) < std::make_pair(offsets[b], numels[b]);
  });
  int64_t end = 0;
  for (int64_t i : order) {
    check(offsets[i] >= end && numels[i] <= numel && offsets[i] <= numel - numels[i], op, "a slot of ", numels[i],
          " elements at offset ", offsets[i], " overlaps another or leaves the buffer of ", numel, " elements");
    end = offsets[i] + numels[i];
  }
  return order;
}

inline std::vector<std::vector<int64_t>> unpack_shapes(const char* op, const std::vector<int64_t>& sizes,
                                                       const std::vector<int64_t>& ranks) {
  std::vector<std::vector<int64_t>> shapes;
  size_t at = 0;
  for (int64_t rank : ranks) {
    check(rank >= 0 && static_cast<size_t>(rank) <= sizes.size() - at, op, "ranks do not add up to the ", sizes.size(),
          " sizes given");
    shapes.emplace_back(sizes.begin() + at, sizes.begin() + at + rank);
    at += rank;
  }
  check(at == sizes.size(), op, "ranks add up to ", at, ", but ", sizes.size(), " sizes were given");
  for (int64_t size : sizes) check(size >= 0, op, "sizes must not be negative, got ", size);
  return shapes;
}

// Product of the sizes; throws where it does not fit 63 bits.
inline int64_t numel_of(const char* op, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (int64_t size : shape) check(!__builtin_mul_overflow(numel, size, &numel), op, "sizes overflow 64 bits");
  return numel;
}

inline std::vector<Tensor> checked_contiguous(const char* op, const std::vector<Tensor>& tensors) {
  check(!tensors.empty(), op, "tensors is empty; expected at least one tensor");
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    check(is_floating(tensors[i].scalar_type()), op, "tensors[", i, "] is ", dtype_name(tensors[i].scalar_type()),
          "; expected a floating point tensor");
    check(same_device(tensors[i], tensors[0]), op, "tensors[", i, "] is on another device than tensors[0]");
    result.push_back(tensors[i].is_contiguous() ? tensors[i] : torch::stable::contiguous(tensors[i]));
  }
  return result;
}

}  // namespace apexfx
