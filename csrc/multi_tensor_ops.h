// multi_tensor_scale, multi_tensor_axpby and multi_tensor_l2norm up to the point where the devices differ. All set an
// on-device flag where an input is infinite or NaN; none waits for the host.
#pragma once

#include "tensor_lists.h"

namespace apexfx {

inline float* flag_pointer(const char* op, const Tensor& found_inf, const TensorLists& lists) {
  const float* flag = scalar_pointer(op, "found_inf", found_inf, lists.size() > 0 ? lists.first() : found_inf);
  return const_cast<float*>(flag);
}

template <typename Backend>
struct MultiTensorOps {
  // outputs = inputs * scale (times *scale_tensor where given)
  static void scale(ListArgument inputs, ListArgument outputs, const Tensor& found_inf, double scale,
                    std::optional<Tensor> scale_tensor) {
    const char* op = "multi_tensor_scale";
    TensorLists lists(op, {inputs, outputs});
    lists.expect("inputs", false, Dtypes::kFloating);
    lists.expect("outputs", true, Dtypes::kFloating);
    float* flag = flag_pointer(op, found_inf, lists);
    const float* factor = scalar_pointer(op, "scale_tensor", scale_tensor, found_inf);
    if (lists.size() > 0) Backend::scale(lists, scale, factor, flag);
  }

  // outputs = a x + b y; the flag looks at x (0), y (1) or both (-1)
  static void axpby(ListArgument x, ListArgument y, ListArgument outputs, const Tensor& found_inf, double a, double b,
                    int64_t arg_to_check) {
    const char* op = "multi_tensor_axpby";
    TensorLists lists(op, {x, y, outputs});
    check(arg_to_check >= -1 && arg_to_check <= 1, op, "arg_to_check is ", arg_to_check, "; expected -1, 0 or 1");
    lists.expect("x", false, Dtypes::kFloating);
    lists.expect("y", false, Dtypes::kFloating);
    lists.expect("outputs", true, Dtypes::kFloating);
    float* flag = flag_pointer(op, found_inf, lists);
    if (lists.size() > 0) Backend::axpby(lists, a, b, static_cast<int>(arg_to_check), flag);
  }

  // (norm of all, norm of each or nothing, found_inf), of tensors * *inv_scale where given
  static std::tuple<Tensor, Tensor, Tensor> l2norm(ListArgument tensors, std::optional<Tensor> inv_scale,
                                                   bool per_tensor) {
    const char* op = "multi_tensor_l2norm";
    TensorLists lists(op, {tensors});
    check(lists.size() > 0, op, "tensors is empty; expected at least one tensor");
    lists.expect("tensors", false, Dtypes::kFloating);
    const float* factor = scalar_pointer(op, "inv_scale", inv_scale, lists.first());
    Tensor norm = torch::stable::new_empty(lists.first(), {}, ScalarType::Float);
    Tensor found_inf = torch::stable::new_empty(lists.first(), {}, ScalarType::Float);
    const int64_t count = per_tensor ? static_cast<int64_t>(lists.size()) : 0;
    Tensor norms = torch::stable::new_empty(lists.first(), {count}, ScalarType::Float);
    Backend::l2norm(lists, factor, norm, per_tensor ? &norms : nullptr, found_inf);
    return {norm, norms, found_inf};
  }
};

#define APEXFX_REGISTER_MULTI_TENSOR(library, Backend)                           \
  library.impl("multi_tensor_scale", TORCH_BOX(&MultiTensorOps<Backend>::scale)); \
  library.impl("multi_tensor_axpby", TORCH_BOX(&MultiTensorOps<Backend>::axpby)); \
  library.impl("multi_tensor_l2norm", TORCH_BOX(&MultiTensorOps<Backend>::l2norm))

}  // namespace apexfx
