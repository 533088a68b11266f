// A list argument of an op, with what is to be known of its tensors: a model has hundreds of them, and for each one
// torch::stable::Tensor would allocate twice, and call into torch for every question whenever it is put.
#pragma once

#include "common.h"

namespace apexfx {

// Tensor[] in the signature of a kernel: the list as torch hands it over. Belongs to the kernel, as do its handles.
struct ListArgument {
  StableListHandle handle;
};

inline ScalarType dtype_of(AtenTensorHandle tensor) {
  static const int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64(),
                       float16 = aoti_torch_dtype_float16(), bfloat16 = aoti_torch_dtype_bfloat16();
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  return dtype == float32    ? ScalarType::Float
         : dtype == bfloat16 ? ScalarType::BFloat16
         : dtype == float16  ? ScalarType::Half
         : dtype == float64  ? ScalarType::Double
                             : ScalarType::Undefined;
}

class TensorList {
 public:
  struct Item {
    AtenTensorHandle handle;
    const int64_t *sizes, *strides;
    int64_t dim, numel;
    ScalarType dtype;
    int32_t device_type, device_index;
  };

  // (Delegates: from there on the destructor runs, whatever is thrown.)
  explicit TensorList(ListArgument argument) : TensorList() {
    size_t size;
    TORCH_ERROR_CODE_CHECK(torch_list_size(argument.handle, &size));
    items_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue value;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(argument.handle, i, &value));
      items_[i].handle = torch::stable::detail::to<AtenTensorHandle>(value);
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(argument.handle));
    for (Item& item : items_) ask(item);
  }
  TensorList(TensorList&&) = default;
  TensorList(const TensorList&) = delete;
  ~TensorList() {
    // The tensors left the caches while the op ran. Counting a reference down waits for its tensor, one after another;
    // asking for all of them first does not. A handle is an at::Tensor, whose first word points to the tensor.
    for (const Item& item : items_)
      if (item.handle != nullptr) __builtin_prefetch(*reinterpret_cast<void* const*>(item.handle));
    for (const Item& item : items_) aoti_torch_delete_tensor_object(item.handle);
  }

  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  const Item& operator[](size_t i) const { return items_[i]; }
  std::vector<Item>::const_iterator begin() const { return items_.begin(); }
  std::vector<Item>::const_iterator end() const { return items_.end(); }

 private:
  TensorList() = default;

  static void ask(Item& item) {
    int64_t *sizes, *strides;
    item.dtype = dtype_of(item.handle);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(item.handle, &item.device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(item.handle, &item.device_index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(item.handle, &item.dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(item.handle, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(item.handle, &strides));
    item.sizes = sizes;
    item.strides = strides;
    item.numel = 1;
    for (int64_t d = 0; d < item.dim; ++d) item.numel *= sizes[d];
  }

  std::vector<Item> items_;
};

using TensorItem = TensorList::Item;

inline void* data_of(const TensorItem& item, bool written) {
  void* writable;
  const void* readable;
  if (written) {
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(item.handle, &writable));
    return writable;
  }
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(item.handle, &readable));
  return const_cast<void*>(readable);
}

// The tensor with a handle of its own.
inline Tensor tensor_of(const TensorItem& item) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(item.handle, &handle));
  return Tensor(handle);
}

inline bool same_device(const TensorItem& a, const TensorItem& b) {
  return a.device_type == b.device_type && a.device_index == b.device_index;
}

inline bool same_sizes(const TensorItem& a, const TensorItem& b) {
  return a.dim == b.dim && std::equal(a.sizes, a.sizes + a.dim, b.sizes);
}

// True where both, of the same sizes, walk memory in the same order.
inline bool same_strides(const TensorItem& a, const TensorItem& b) {
  for (int64_t d = 0; d < a.dim; ++d)
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  return true;
}

inline bool is_contiguous(const TensorItem& item) {
  int64_t expected = 1;
  for (int64_t d = item.dim - 1; d >= 0; --d) {
    if (item.sizes[d] > 1 && item.strides[d] != expected) return false;
    expected *= item.sizes[d];
  }
  return true;
}

// True where the elements fill one block of memory without gaps or overlap, in any order of dimensions.
inline bool is_dense(const TensorItem& item) {
  if (item.numel < 2 || is_contiguous(item)) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < item.dim; ++d)
    if (item.sizes[d] > 1) dims.emplace_back(item.strides[d], item.sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

}  // namespace apexfx
