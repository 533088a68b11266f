// Arithmetic of layer norm and RMS norm, shared by the CPU and the CUDA kernels: what runs on the CPU in CI is the
// formula that runs on the GPU. A row x of n columns, with weight w and bias b:
//
//   layer norm: mean = sum(x) / n, rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)
//   RMS norm:   mean = 0,          rstd = 1 / sqrt(sum(x^2) / n + eps), b = 0
//   h = (x - mean) * rstd,  y = h * w + b
//   with g = dy * w:  dx = (g - (sum(g) / n + h * sum(g * h) / n)) * rstd     (RMS norm: without sum(g))
//   dw = sum over rows of dy * h,  db = sum over rows of dy
//
// T is the accumulation type: float, or double for float64 tensors.
#pragma once

#include "common.h"

namespace apexfx {
namespace norm {

template <typename T>
APEXFX_HD T normalized(T x, T mean, T rstd) {
  return (x - mean) * rstd;
}

template <typename T>
APEXFX_HD T affine(T h, T weight, T bias) {
  return h * weight + bias;
}

// |w| >= eps with the sign of w; zero counts as positive. NaN stays NaN.
template <typename T>
APEXFX_HD T clamp_by_magnitude(T weight, T eps) {
  const T positive = weight < eps ? eps : weight;
  const T negative = weight > -eps ? -eps : weight;
  return weight < T(0) ? negative : positive;
}

// h from y: the memory-efficient backward.
template <typename T>
APEXFX_HD T recovered(T y, T weight, T bias, T eps) {
  return (y - bias) / clamp_by_magnitude(weight, eps);
}

// Count, mean and sum of squared deviations of some values, and the same of two sets together (Chan, Golub, LeVeque).
template <typename T>
struct Moments {
  T count, mean, m2;
};

template <typename T>
APEXFX_HD Moments<T> merged(const Moments<T>& a, const Moments<T>& b) {
  const T count = a.count + b.count;
  if (count == T(0)) return a;
  const T delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

template <typename T>
APEXFX_HD T input_gradient(T g, T h, T mean_g, T mean_gh, T rstd) {
  return (g - (mean_g + h * mean_gh)) * rstd;
}

// ---- argument checks, the same as apexfx/ops/_norm_arguments.py, where the messages are explained ----

struct Rows {
  int64_t count, columns;
};

inline ScalarType accumulate_dtype(ScalarType t) { return t == ScalarType::Double ? t : ScalarType::Float; }

inline bool mixes(ScalarType a, ScalarType b) { return (a == ScalarType::Double) == (b == ScalarType::Double); }

inline void check_floating(const char* op, const char* name, ScalarType dtype) {
  check(is_floating(dtype), op, name, " is ", dtype_name(dtype), "; expected float64, float32, float16 or bfloat16");
}

inline void check_parameter(const char* op, const char* name, const std::optional<Tensor>& parameter, const Tensor& x,
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

inline Rows check_forward(const char* op, const Tensor& x, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& bias, int64_t num_dims, double eps,
                          std::optional<ScalarType> dtype) {
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
  std::optional<Tensor> mean;
  Tensor rstd;
  std::optional<Tensor> weight, bias;
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
inline Tensor parameter_gradient(const std::optional<Tensor>& parameter, const Tensor& rstd) {
  if (!parameter.has_value()) return torch::stable::new_empty(rstd, {0});
  return torch::stable::new_empty(*parameter, sizes_of(*parameter, parameter->dim()));
}

}  // namespace norm
}  // namespace apexfx
