// checksum up to the point where the devices differ: the elements of every tensor as unsigned integers, in the order of
// memory.
#pragma once

#include "tensor_lists.h"

namespace apexfx {

// The unsigned integer of so many bytes.
inline ScalarType word_dtype(size_t bytes) {
  return bytes == 1   ? ScalarType::Byte
         : bytes == 2 ? ScalarType::UInt16
         : bytes == 4 ? ScalarType::UInt32
                      : ScalarType::UInt64;
}

// Calls f(T{}) with a dtype of the above.
template <typename F>
inline void dispatch_word(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Byte: f(uint8_t{}); return;
    case ScalarType::UInt16: f(uint16_t{}); return;
    case ScalarType::UInt32: f(uint32_t{}); return;
    default: f(uint64_t{});
  }
}

// An element x as what is summed: y (2 y + 1) as 2 squares + sum, so that no factor is wider than x.
struct WordSum {
  uint64_t sum = 0, squares = 0;

  template <typename T>
  APEXFX_HD void add(T x) {
    uint64_t y = x;
    if constexpr (sizeof(T) == 8) y ^= y >> 32;
    sum += y;
    squares += y * y;
  }
  APEXFX_HD uint64_t total() const { return 2 * squares + sum; }
};

// sums[i] = sum of y (2 y + 1) over the elements x of tensors[i], modulo 2^64, y = x xor (x >> 32)
template <typename Backend>
Tensor checksum(ListArgument tensors) {
  const char* op = "checksum";
  const TensorList list(tensors);
  check(!list.empty(), op, "tensors is empty; expected at least one tensor");
  std::vector<Tensor> copies;
  std::vector<Position> positions(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const TensorItem& item = list[i];
    check(same_device(item, list[0]), op, "tensors[", i, "] is on another device than tensors[0]");
    if (!is_dense(item)) copies.push_back(torch::stable::contiguous(tensor_of(item)));
    positions[i].data[0] = is_dense(item) ? data_of(item, false) : copies.back().data_ptr();
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(item.handle, &dtype));
    const size_t bytes = aoti_torch_dtype_element_size(dtype), word = std::min<size_t>(bytes, 8);
    positions[i].dtype[0] = word_dtype(word);
    positions[i].numel = item.numel * static_cast<int64_t>(bytes / word);
  }
  const Tensor sums = torch::stable::new_zeros(tensor_of(list[0]), {static_cast<int64_t>(list.size())}, ScalarType::Long);
  Backend::add(positions, sums);
  return sums;
}

}  // namespace apexfx
