// Lists of tensors that one op walks in step: checked, and brought to layouts in which element k of every operand of a
// position is the same element of the tensor.
#pragma once

#include <cmath>

#include "common.h"

namespace apexfx {

constexpr int kMaxOperands = 5;

// One position of the lists: raw pointers in the order the lists were added (nullptr for an absent list).
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
  explicit TensorLists(const char* op) : op_(op) {}

  // Adds a list; the first one added fixes number, sizes and device. An empty list is allowed where `optional`.
  void add(const char* name, const std::vector<Tensor>& tensors, bool written, Dtypes dtypes, bool optional = false) {
    const size_t slot = lists_.size();
    if (slot > 0 && optional && tensors.empty()) {
      lists_.push_back(&tensors);
      written_.push_back(written);
      return;
    }
    if (slot > 0)
      check(tensors.size() == list(0).size(), op_, name, " has ", tensors.size(), " tensors, ", first_name_, " has ",
            list(0).size());
    else
      start(name, tensors);
    for (size_t i = 0; i < tensors.size(); ++i) check_one(name, i, tensors[i], slot == 0 ? tensors[0] : list(0)[i], dtypes);
    lists_.push_back(&tensors);
    written_.push_back(written);
  }

  size_t size() const { return lists_.empty() ? 0 : list(0).size(); }
  const Tensor& first() const { return list(0)[0]; }

  // Returns the positions; operands whose layouts disagree are replaced by contiguous copies.
  std::vector<Position> positions() {
    std::vector<Position> result(size());
    for (size_t i = 0; i < size(); ++i) {
      const bool direct = same_layout(i);
      result[i].numel = list(0)[i].numel();
      for (size_t slot = 0; slot < lists_.size(); ++slot) {
        if (list(slot).empty()) continue;
        const Tensor* operand = &list(slot)[i];
        if (!direct && !operand->is_contiguous()) {
          copies_.push_back(torch::stable::contiguous(*operand));
          if (written_[slot]) write_back_.emplace_back(*operand, copies_.back());
          operand = &copies_.back();
        }
        result[i].data[slot] = operand->data_ptr();
        result[i].dtype[slot] = operand->scalar_type();
      }
    }
    return result;
  }

  // Copies the results of written operands back where a contiguous copy stood in for them.
  void finish() {
    for (auto& [original, copy] : write_back_) torch::stable::copy_(original, copy);
  }

 private:
  // What every tensor is compared with; asking a tensor costs a call into torch.
  void start(const char* name, const std::vector<Tensor>& tensors) {
    first_name_ = name;
    if (!tensors.empty()) device_ = tensors[0].device();
    for (const Tensor& t : tensors) dtypes_.push_back(t.scalar_type());
  }

  void check_one(const char* name, size_t i, const Tensor& t, const Tensor& first, Dtypes dtypes) const {
    const ScalarType dtype = t.scalar_type(), first_dtype = lists_.empty() ? dtype : dtypes_[i];
    const bool is_double = dtype == ScalarType::Double;
    const bool is_low = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
    check(is_double || is_low || dtype == ScalarType::Float, op_, name, "[", i, "] is ", dtype_name(dtype),
          "; expected float32, float16, bfloat16 or float64");
    check(t.device() == *device_, op_, name, "[", i, "] is on another device than ",
          first_name_, "[0]");
    if (lists_.empty()) return;
    check(same_sizes(t, first), op_, name, "[", i, "] does not have the sizes of ", first_name_, "[", i, "]");
    check(is_double == (first_dtype == ScalarType::Double), op_, name, "[", i, "] is ", dtype_name(dtype), " while ",
          first_name_, "[", i, "] is ", dtype_name(first_dtype), "; float64 goes only with float64");
    check(dtypes == Dtypes::kFloating || !is_low, op_, name, "[", i, "] is ", dtype_name(dtype), "; expected float32");
  }

  bool same_layout(size_t i) const {
    if (!is_dense(list(0)[i])) return false;
    for (size_t slot = 1; slot < lists_.size(); ++slot)
      if (!list(slot).empty() && !same_strides(list(slot)[i], list(0)[i])) return false;
    return true;
  }

  const std::vector<Tensor>& list(size_t slot) const { return *lists_[slot]; }

  const char* op_;
  const char* first_name_ = "";
  std::optional<torch::stable::Device> device_;
  std::vector<ScalarType> dtypes_;
  std::vector<const std::vector<Tensor>*> lists_;  // the caller's
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
