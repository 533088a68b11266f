// The optimizer ops up to the point where the devices differ: argument checks, lists, scalars. `Backend` supplies the
// passes over memory (csrc/cpu/optimizers.cpp, csrc/cuda/optimizers.cu). Operand order in every list: param, grad,
// state..., low-precision model copy last.
#pragma once

#include "optimizer_math.h"
#include "tensor_lists.h"

namespace apexfx {

using Scalar = std::optional<Tensor>;

inline DeviceScalars device_scalars(const char* op, const Tensor& like, const std::optional<Tensor>& step,
                                    const Scalar& lr, const Scalar& grad_scale, const Scalar& found_inf,
                                    const Scalar& clip_coefficient, bool unscales) {
  return {scalar_pointer(op, "step", step, like), scalar_pointer(op, "lr_tensor", lr, like),
          scalar_pointer(op, "grad_scale", grad_scale, like), scalar_pointer(op, "found_inf", found_inf, like),
          scalar_pointer(op, "clip_coefficient", clip_coefficient, like), unscales && grad_scale.has_value()};
}

// kUnscales: the overload that leaves the gradients divided by grad_scale.
template <typename Backend>
struct OptimizerOps {
  template <bool kUnscales>
  static void adam(ListArgument params, ListArgument grads, ListArgument exp_avgs, ListArgument exp_avg_sqs,
                   ListArgument model_params, const Tensor& step, double lr, double beta1, double beta2, double eps,
                   double weight_decay, bool decoupled, bool bias_correction, Scalar lr_tensor, Scalar grad_scale,
                   Scalar found_inf, Scalar clip_coefficient) {
    const char* op = "adam_";
    TensorLists lists(op, {params, grads, exp_avgs, exp_avg_sqs, model_params});
    check_adam(op, lr, beta1, beta2, eps, weight_decay);
    expect_moments(lists, kUnscales);
    if (lists.size() == 0) return;
    const auto scalars = device_scalars(op, lists.first(), step, lr_tensor, grad_scale, found_inf, clip_coefficient, kUnscales);
    Backend::adam(lists, {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, true}, scalars);
  }

  template <bool kUnscales>
  static void lamb(ListArgument params, ListArgument grads, ListArgument exp_avgs, ListArgument exp_avg_sqs,
                   ListArgument model_params, const Tensor& step, double lr, double beta1, double beta2, double eps,
                   double weight_decay, bool decoupled, bool bias_correction, bool grad_averaging, bool use_nvlamb,
                   Scalar lr_tensor, Scalar grad_scale, Scalar found_inf, Scalar clip_coefficient) {
    const char* op = "lamb_";
    TensorLists lists(op, {params, grads, exp_avgs, exp_avg_sqs, model_params});
    check_adam(op, lr, beta1, beta2, eps, weight_decay);
    expect_moments(lists, kUnscales);
    if (lists.size() == 0) return;
    const auto scalars = device_scalars(op, lists.first(), step, lr_tensor, grad_scale, found_inf, clip_coefficient, kUnscales);
    const bool adapts = use_nvlamb || weight_decay != 0.0;
    Backend::lamb(lists, {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, grad_averaging}, adapts,
                  scalars);
  }

  template <bool kUnscales>
  static void sgd(ListArgument params, ListArgument grads, ListArgument momentum_buffers, ListArgument model_params,
                  double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                  bool wd_after_momentum, bool first_run, Scalar lr_tensor, Scalar grad_scale, Scalar found_inf,
                  Scalar clip_coefficient) {
    const char* op = "sgd_";
    TensorLists lists(op, {params, grads, momentum_buffers, model_params});
    check_not_negative(op, "lr", lr);
    check_not_negative(op, "momentum", momentum);
    check(std::isfinite(dampening), op, "dampening is ", dampening, "; expected a finite number");
    check_not_negative(op, "weight_decay", weight_decay);
    lists.expect("params", true, Dtypes::kFloating);
    lists.expect("grads", kUnscales, Dtypes::kFloating);
    lists.expect("momentum_buffers", true, Dtypes::kAccumulation, momentum == 0.0);
    lists.expect("model_params", true, Dtypes::kFloating, true);
    if (lists.size() == 0) return;
    const auto scalars =
        device_scalars(op, lists.first(), std::nullopt, lr_tensor, grad_scale, found_inf, clip_coefficient, kUnscales);
    Backend::sgd(lists, {lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, first_run}, scalars);
  }

  template <bool kUnscales>
  static void adagrad(ListArgument params, ListArgument grads, ListArgument sums, ListArgument model_params, double lr,
                      double eps, double weight_decay, bool decoupled, Scalar lr_tensor, Scalar grad_scale,
                      Scalar found_inf, Scalar clip_coefficient) {
    const char* op = "adagrad_";
    TensorLists lists(op, {params, grads, sums, model_params});
    check_not_negative(op, "lr", lr);
    check_not_negative(op, "eps", eps);
    check_not_negative(op, "weight_decay", weight_decay);
    lists.expect("params", true, Dtypes::kFloating);
    lists.expect("grads", kUnscales, Dtypes::kFloating);
    lists.expect("sums", true, Dtypes::kAccumulation);
    lists.expect("model_params", true, Dtypes::kFloating, true);
    if (lists.size() == 0) return;
    const auto scalars =
        device_scalars(op, lists.first(), std::nullopt, lr_tensor, grad_scale, found_inf, clip_coefficient, kUnscales);
    Backend::adagrad(lists, {lr, eps, weight_decay, decoupled}, scalars);
  }

  template <bool kUnscales>
  static void novograd(ListArgument params, ListArgument grads, ListArgument exp_avgs, ListArgument norms,
                       ListArgument model_params, const Tensor& step, double lr, double beta1, double beta2, double eps,
                       double weight_decay, bool bias_correction, bool grad_averaging, bool reg_inside_moment,
                       int64_t norm_type, Scalar lr_tensor, Scalar grad_scale, Scalar found_inf, Scalar clip_coefficient) {
    const char* op = "novograd_";
    TensorLists lists(op, {params, grads, exp_avgs, model_params});
    const TensorList kept_norms(norms);
    check_adam(op, lr, beta1, beta2, eps, weight_decay);
    check(norm_type == 0 || norm_type == 2, op, "norm_type is ", norm_type, "; expected 2, or 0 for the max norm");
    lists.expect("params", true, Dtypes::kFloating);
    lists.expect("grads", kUnscales, Dtypes::kFloating);
    lists.expect("exp_avgs", true, Dtypes::kAccumulation);
    lists.expect("model_params", true, Dtypes::kFloating, true);
    check(kept_norms.size() == lists.size(), op, "norms has ", kept_norms.size(), " tensors, params has ",
          lists.size());
    if (lists.size() == 0) return;
    std::vector<float*> norm_pointers;
    for (const TensorItem& norm : kept_norms) {
      check(norm.numel == 1 && norm.dtype == ScalarType::Float, op, "a tensor of norms must hold one float32, got ",
            norm.numel, " of ", dtype_name(norm.dtype));
      check(same_device(norm, lists.first_item()), op, "a tensor of norms is on another device than the tensors");
      norm_pointers.push_back(static_cast<float*>(data_of(norm, true)));
    }
    const auto scalars = device_scalars(op, lists.first(), step, lr_tensor, grad_scale, found_inf, clip_coefficient, kUnscales);
    Backend::novograd(
        lists, norm_pointers,
        {lr, beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, reg_inside_moment, norm_type == 0},
        scalars);
  }

 private:
  static void check_adam(const char* op, double lr, double beta1, double beta2, double eps, double weight_decay) {
    check_not_negative(op, "lr", lr);
    check_decay_rate(op, "beta1", beta1);
    check_decay_rate(op, "beta2", beta2);
    check_not_negative(op, "eps", eps);
    check_not_negative(op, "weight_decay", weight_decay);
  }

  static void expect_moments(TensorLists& lists, bool unscales) {
    lists.expect("params", true, Dtypes::kFloating);
    lists.expect("grads", unscales, Dtypes::kFloating);
    lists.expect("exp_avgs", true, Dtypes::kAccumulation);
    lists.expect("exp_avg_sqs", true, Dtypes::kAccumulation);
    lists.expect("model_params", true, Dtypes::kFloating, true);
  }
};

// The registration lines both devices share.
#define APEXFX_REGISTER_OPTIMIZERS(library, Backend)                              \
  library.impl("adam_", TORCH_BOX(&OptimizerOps<Backend>::adam<false>));          \
  library.impl("lamb_", TORCH_BOX(&OptimizerOps<Backend>::lamb<false>));          \
  library.impl("sgd_", TORCH_BOX(&OptimizerOps<Backend>::sgd<false>));            \
  library.impl("adagrad_", TORCH_BOX(&OptimizerOps<Backend>::adagrad<false>));    \
  library.impl("novograd_", TORCH_BOX(&OptimizerOps<Backend>::novograd<false>));  \
  library.impl("adam_.unscale", TORCH_BOX(&OptimizerOps<Backend>::adam<true>));   \
  library.impl("lamb_.unscale", TORCH_BOX(&OptimizerOps<Backend>::lamb<true>));   \
  library.impl("sgd_.unscale", TORCH_BOX(&OptimizerOps<Backend>::sgd<true>));     \
  library.impl("adagrad_.unscale", TORCH_BOX(&OptimizerOps<Backend>::adagrad<true>)); \
  library.impl("novograd_.unscale", TORCH_BOX(&OptimizerOps<Backend>::novograd<true>))

}  // namespace apexfx
