// List arguments, and lists of tensors that one op goes through in step: checked, and brought to layouts in which
// element k of every operand of a position is the same element of the tensor.
#pragma once

#include <cmath>

#include "common.h"

namespace apexfx {

// ---- one list -------------------------------------------------------------------------------------------------------
// torch::stable::Tensor would allocate twice for each tensor, and call into torch for every question whenever it is put;
// a model has hundreds of them, so TensorList asks once.

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

// ---- lists that belong together -------------------------------------------------------------------------------------

constexpr int kMaxOperands = 5;

// One position of the lists: raw pointers in the order of the lists (nullptr, and ScalarType{}, for an absent list).
struct Position {
  void* data[kMaxOperands] = {};
  ScalarType dtype[kMaxOperands] = {};
  int64_t numel = 0;
};

// What a list's tensors may be.
enum class Dtypes {
  kFloating,      // float32, float16 or bfloat16, whatever the others are; float64 only where the first list is float64
  kAccumulation,  // float64 where the first list is float64, float32 otherwise
};

class TensorLists {
 public:
  TensorLists(const char* op, std::initializer_list<ListArgument> arguments) : op_(op) {
    lists_.reserve(arguments.size());
    for (ListArgument argument : arguments) lists_.emplace_back(argument);
  }

  // Says what the next list is, and checks it; the first one fixes number, sizes and device. It may be empty where
  // `optional`.
  void expect(const char* name, bool written, Dtypes dtypes, bool optional = false) {
    const size_t slot = written_.size();
    const TensorList &list = lists_[slot], &first = lists_[0];
    written_.push_back(written);
    names_.push_back(name);
    if (slot > 0 && optional && list.empty()) return;
    check(list.size() == first.size(), op_, name, " has ", list.size(), " tensors, ", names_[0], " has ",
          first.size());
    for (size_t i = 0; i < list.size(); ++i) check_one(name, i, list[i], dtypes);
  }

  size_t size() const { return lists_[0].size(); }
  const TensorItem& first_item() const { return lists_[0][0]; }
  Tensor first() const { return tensor_of(first_item()); }

  // Returns the positions; operands whose layouts disagree are replaced by contiguous copies.
  std::vector<Position> positions() {
    std::vector<Position> result(size());
    for (size_t i = 0; i < size(); ++i) {
      const bool direct = same_layout(i);
      result[i].numel = lists_[0][i].numel;
      for (size_t slot = 0; slot < lists_.size(); ++slot) {
        if (lists_[slot].empty()) continue;
        const TensorItem& operand = lists_[slot][i];
        result[i].dtype[slot] = operand.dtype;
        result[i].data[slot] = data_of(operand, written_[slot]);
        check(result[i].data[slot] != nullptr || operand.numel == 0, op_, names_[slot], "[", i,
              "] has no memory; its storage was resized to nothing");
        if (!direct && !is_contiguous(operand)) result[i].data[slot] = copy_of(tensor_of(operand), written_[slot]);
      }
    }
    return result;
  }

  // Copies the results of written operands back where a contiguous copy stood in for them.
  void finish() {
    for (auto& [original, copy] : write_back_) torch::stable::copy_(original, copy);
  }

 private:
  void check_one(const char* name, size_t i, const TensorItem& t, Dtypes dtypes) const {
    const TensorItem& first = lists_[0][i];
    const bool is_double = t.dtype == ScalarType::Double;
    const bool is_low = t.dtype == ScalarType::Half || t.dtype == ScalarType::BFloat16;
    check(is_double || is_low || t.dtype == ScalarType::Float, op_, name, "[", i, "] is ", dtype_name(t.dtype),
          "; expected float32, float16, bfloat16 or float64");
    check(same_device(t, lists_[0][0]), op_, name, "[", i, "] is on another device than ", names_[0], "[0]");
    if (&t == &first) return;
    check(same_sizes(t, first), op_, name, "[", i, "] does not have the sizes of ", names_[0], "[", i, "]");
    check(is_double == (first.dtype == ScalarType::Double), op_, name, "[", i, "] is ", dtype_name(t.dtype), " while ",
          names_[0], "[", i, "] is ", dtype_name(first.dtype), "; float64 goes only with float64");
    check(dtypes == Dtypes::kFloating || !is_low, op_, name, "[", i, "] is ", dtype_name(t.dtype),
          "; expected float32");
  }

  bool same_layout(size_t i) const {
    if (!is_dense(lists_[0][i])) return false;
    for (size_t slot = 1; slot < lists_.size(); ++slot)
      if (!lists_[slot].empty() && !same_strides(lists_[slot][i], lists_[0][i])) return false;
    return true;
  }

  void* copy_of(const Tensor& operand, bool written) {
    copies_.push_back(torch::stable::contiguous(operand));
    if (written) write_back_.emplace_back(operand, copies_.back());
    return copies_.back().data_ptr();
  }

  const char* op_;
  std::vector<TensorList> lists_;
  std::vector<const char*> names_;
  std::vector<bool> written_;
  std::vector<std::pair<Tensor, Tensor>> write_back_;
  std::vector<Tensor> copies_;
};

// A one-element float32 tensor on the device of `like`, as a pointer; nullptr where there is none.
inline const float* scalar_pointer(const char* op, const char* name, const std::optional<Tensor>& t, const Tensor& like) {
  if (!t.has_value()) return nullptr;
  check(t->numel() == 1 && t->scalar_type() == ScalarType::Float, op, name, " must hold one float32, got ", t->numel(),
        " of ", dtype_name(t->scalar_type()));
  check(same_device(*t, like), op, name, " is on another device than the tensors");
  return static_cast<const float*>(t->data_ptr());
}

inline void check_not_negative(const char* op, const char* name, double value) {
  check(std::isfinite(value) && value >= 0.0, op, name, " is ", value, "; expected a finite number, zero or more");
}

inline void check_decay_rate(const char* op, const char* name, double value) {
  check(value >= 0.0 && value < 1.0, op, name, " is ", value, "; expected 0 <= ", name, " < 1");
}

}  // namespace apexfx
