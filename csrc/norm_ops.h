// The layer norm and RMS norm ops up to the point where the devices differ: argument checks (the same as
// apexfx/ops/_norms.py) and registration. `Backend` supplies forward and backward (csrc/cpu/norm.cpp,
// csrc/cuda/norm.cu); formulas in csrc/norm.h.
#pragma once

#include "norm.h"

namespace apexfx {
namespace norm {

using Optional = std::optional<Tensor>;

struct Rows {
  int64_t count, columns;
};

inline ScalarType accumulate_dtype(ScalarType t) { return t == ScalarType::Double ? t : ScalarType::Float; }

inline bool mixes(ScalarType a, ScalarType b) { return (a == ScalarType::Double) == (b == ScalarType::Double); }

inline void check_floating(const char* op, const char* name, ScalarType dtype) {
  check(is_floating(dtype), op, name, " is ", dtype_name(dtype), "; expected float64, float32, float16 or bfloat16");
}

inline void check_parameter(const char* op, const char* name, const Optional& parameter, const Tensor& x,
                            int64_t num_dims) {
  if (!parameter.has_value()) return;
  check_floating(op, name, parameter->scalar_type());
  check(same_device(*parameter, x), op, name, " is on another device than x");
  bool same = parameter->dim() == num_dims;
  for (int64_t d = 0; same && d < num_dims; ++d) same = parameter->size(d) == x.size(x.dim() - num_dims + d);
  check(same, op, name, " does not have the shape of the last ", num_dims, " dims of x, which are normalized");
  check(mixes(parameter->scalar_type(), x.scalar_type()), op, name, " is ", dtype_name(parameter->scalar_type()),
        " and x ", dtype_name(x.scalar_type()), "; float64 mixes with no other dtype, cast one of them");
}

inline Rows check_forward(const char* op, const Tensor& x, const Optional& weight, const Optional& bias,
                          int64_t num_dims, double eps, std::optional<ScalarType> dtype) {
  check_floating(op, "x", x.scalar_type());
  check(1 <= num_dims && num_dims <= x.dim(), op, "num_dims=", num_dims, ", but x has ", x.dim(), " dims");
  check(eps >= 0 && eps <= 1.7976931348623157e308, op, "eps=", eps, "; expected a finite number that is not negative");
  check_parameter(op, "weight", weight, x, num_dims);
  check_parameter(op, "bias", bias, x, num_dims);
  check(!weight.has_value() || !bias.has_value() || weight->scalar_type() == bias->scalar_type(), op,
        "weight and bias have two dtypes; give both in one dtype");
  if (dtype.has_value())
    check(*dtype == x.scalar_type() || (weight.has_value() && *dtype == weight->scalar_type()) ||
              (bias.has_value() && *dtype == bias->scalar_type()),
          op, "dtype=", dtype_name(*dtype), "; expected x's dtype or the parameters'");
  Rows rows{1, 1};
  for (int64_t d = 0; d < x.dim(); ++d) (d < x.dim() - num_dims ? rows.count : rows.columns) *= x.size(d);
  return rows;
}

inline void check_statistic(const char* op, const char* name, const Tensor& value, const Tensor& saved,
                            int64_t num_dims) {
  check(same_device(value, saved), op, name, " is on another device than saved");
  bool same = value.dim() == saved.dim() - num_dims && value.scalar_type() == accumulate_dtype(saved.scalar_type());
  for (int64_t d = 0; same && d < value.dim(); ++d) same = value.size(d) == saved.size(d);
  check(same, op, name, " has not the shape and dtype the forward returned it in");
}

// What both backward ops of both norms take; mean and bias are absent for RMS norm.
struct Backward {
  const char* op;
  Tensor grad, saved;
  Optional mean;
  Tensor rstd;
  Optional weight, bias;
  int64_t num_dims;
  double eps;
  bool from_output;
  ScalarType input_dtype;
};

inline Rows check_backward(const Backward& a, bool needs_mean) {
  const Rows rows = check_forward(a.op, a.saved, a.weight, a.bias, a.num_dims, a.eps, std::nullopt);
  const ScalarType saved = a.saved.scalar_type();
  check_floating(a.op, "grad", a.grad.scalar_type());
  check(same_device(a.grad, a.saved), a.op, "grad is on another device than saved");
  check(same_sizes(a.grad, a.saved), a.op, "grad has not the shape of saved");
  check(mixes(a.grad.scalar_type(), saved), a.op, "grad is ", dtype_name(a.grad.scalar_type()), " and saved ",
        dtype_name(saved), "; float64 mixes with nothing else");
  check(is_floating(a.input_dtype) && mixes(a.input_dtype, saved), a.op, "input_dtype=", dtype_name(a.input_dtype),
        " does not go with saved, which is ", dtype_name(saved));
  if (a.mean.has_value()) check_statistic(a.op, "mean", *a.mean, a.saved, a.num_dims);
  check(a.mean.has_value() || !needs_mean || a.from_output, a.op,
        "mean is None; only a backward from the output (from_output=True) needs none");
  check_statistic(a.op, "rstd", a.rstd, a.saved, a.num_dims);
  return rows;
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline std::vector<int64_t> sizes_of(const Tensor& t, int64_t dims) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < dims; ++d) sizes.push_back(t.size(d));
  return sizes;
}

// An empty tensor stands for the gradient of a parameter that is not there.
inline Tensor parameter_gradient(const Optional& parameter, const Tensor& rstd) {
  if (!parameter.has_value()) return torch::stable::new_empty(rstd, {0});
  return torch::stable::new_empty(*parameter, sizes_of(*parameter, parameter->dim()));
}

struct Forward {
  Tensor y, mean, rstd;  // mean is undefined for RMS norm
};

struct Gradients {
  Tensor dx, dweight, dbias;
};

// Backend::forward(op, x, weight, bias, num_dims, eps, dtype, centered) -> Forward
// Backend::backward(arguments, centered, parameters) -> Gradients; `centered`: layer norm; `parameters`: dweight and dbias
template <typename Backend>
struct NormOps {
  // x: [rows, n] -> y: [rows, n], mean: [rows], rstd: [rows]
  static std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, Optional weight, Optional bias,
                                                       int64_t num_dims, double eps, std::optional<ScalarType> dtype,
                                                       bool) {
    auto out = Backend::forward("layer_norm", x, weight, bias, num_dims, eps, dtype, true);
    return {out.y, out.mean, out.rstd};
  }

  static Tensor layer_norm_backward_input(const Tensor& grad, const Tensor& saved, Optional mean, const Tensor& rstd,
                                          Optional weight, Optional bias, int64_t num_dims, double eps,
                                          bool from_output, ScalarType input_dtype) {
    return Backend::backward({"layer_norm_backward_input", grad, saved, mean, rstd, weight, bias, num_dims, eps,
                              from_output, input_dtype}, true, false).dx;
  }

  static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& saved, Optional mean,
                                                                const Tensor& rstd, Optional weight, Optional bias,
                                                                int64_t num_dims, double eps, bool from_output,
                                                                ScalarType input_dtype) {
    auto out = Backend::backward({"layer_norm_backward", grad, saved, mean, rstd, weight, bias, num_dims, eps,
                                  from_output, input_dtype}, true, true);
    return {out.dx, out.dweight, out.dbias};
  }

  // x: [rows, n] -> y: [rows, n], rstd: [rows]
  static std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, Optional weight, int64_t num_dims, double eps,
                                             std::optional<ScalarType> dtype, bool) {
    auto out = Backend::forward("rms_norm", x, weight, std::nullopt, num_dims, eps, dtype, false);
    return {out.y, out.rstd};
  }

  static Tensor rms_norm_backward_input(const Tensor& grad, const Tensor& saved, const Tensor& rstd, Optional weight,
                                        int64_t num_dims, double eps, bool from_output, ScalarType input_dtype) {
    return Backend::backward({"rms_norm_backward_input", grad, saved, std::nullopt, rstd, weight, std::nullopt,
                              num_dims, eps, from_output, input_dtype}, false, false).dx;
  }

  static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& saved, const Tensor& rstd,
                                                      Optional weight, int64_t num_dims, double eps, bool from_output,
                                                      ScalarType input_dtype) {
    auto out = Backend::backward({"rms_norm_backward", grad, saved, std::nullopt, rstd, weight, std::nullopt, num_dims,
                                  eps, from_output, input_dtype}, false, true);
    return {out.dx, out.dweight};
  }
};

}  // namespace norm
}  // namespace apexfx

// The registration that both devices share.
#define APEXFX_REGISTER_NORMS(library, Backend)                                                                  \
  library.impl("layer_norm", TORCH_BOX(&NormOps<Backend>::layer_norm));                                          \
  library.impl("layer_norm_backward_input", TORCH_BOX(&NormOps<Backend>::layer_norm_backward_input));            \
  library.impl("layer_norm_backward", TORCH_BOX(&NormOps<Backend>::layer_norm_backward));                        \
  library.impl("rms_norm", TORCH_BOX(&NormOps<Backend>::rms_norm));                                              \
  library.impl("rms_norm_backward_input", TORCH_BOX(&NormOps<Backend>::rms_norm_backward_input));                \
  library.impl("rms_norm_backward", TORCH_BOX(&NormOps<Backend>::rms_norm_backward))
