// Lists of tensors that one op walks in step: checked, and brought to layouts in which element k of every operand of a
// position is the same element of the tensor.
#pragma once

#include <cmath>

#include "tensor_list.h"

namespace apexfx {

constexpr int kMaxOperands = 5;

// One position of the lists: raw pointers in the order of the lists (nullptr for an absent list).
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
