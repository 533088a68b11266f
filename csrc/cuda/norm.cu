// Layer norm and RMS norm over the rows of a CUDA tensor: dtypes, outputs and registration; arguments in csrc/norm_ops.h,
// launches in norm_launch.cuh.
#include <limits>

#include "norm_cuda.h"

namespace apexfx {
namespace norm {
namespace {

Optional dense_as(const Optional& t, ScalarType dtype) {
  if (!t.has_value()) return t;
  return dense(t->scalar_type() == dtype ? *t : torch::stable::to(*t, dtype));
}

// Parameters in a dtype the kernels know: the input's, or float32.
ScalarType parameter_dtype(const Optional& weight, const Optional& bias, ScalarType x) {
  const Optional& any = weight.has_value() ? weight : bias;
  return any.has_value() && any->scalar_type() == x ? x : accumulate_dtype(x);
}

struct Cuda {
  static Forward forward(const char* op, const Tensor& x, const Optional& weight, const Optional& bias,
                         int64_t num_dims, double eps, std::optional<ScalarType> dtype, bool centered) {
    const Rows rows = check_forward(op, x, weight, bias, num_dims, eps, dtype);
    const DeviceGuard guard(x.get_device_index());
    const ScalarType x_dtype = x.scalar_type(), accumulate = accumulate_dtype(x_dtype);
    const ScalarType parameters = parameter_dtype(weight, bias, x_dtype), wanted = dtype.value_or(x_dtype);
    const ScalarType y_dtype = wanted == x_dtype || wanted == parameters ? wanted : accumulate;
    const auto leading = sizes_of(x, x.dim() - num_dims);
    ForwardTensors t;
    t.x = dense(x);
    t.y = torch::stable::new_empty(x, sizes_of(x, x.dim()), y_dtype);
    if (centered) t.mean = torch::stable::new_empty(x, leading, accumulate);
    t.rstd = torch::stable::new_empty(x, leading, accumulate);
    t.weight = dense_as(weight, parameters);
    t.bias = dense_as(bias, parameters);
    t.rows = rows;
    t.eps = eps;
    t.centered = centered;
    if (rows.columns == 0) {  // the mean of nothing, as torch
      if (centered) torch::stable::fill_(t.mean, std::numeric_limits<double>::quiet_NaN());
      torch::stable::fill_(t.rstd, std::numeric_limits<double>::quiet_NaN());
    } else if (rows.count > 0) {
      dispatch_float_or_double(x_dtype, op, "x", [&](auto zero) { forward_of<decltype(zero)>(t); });
    }
    return {y_dtype == wanted ? t.y : torch::stable::to(t.y, wanted), t.mean, t.rstd};
  }

  static Gradients backward(Backward a, bool centered, bool parameters) {
    const Rows rows = check_backward(a, centered);
    const DeviceGuard guard(a.saved.get_device_index());
    Gradients out;
    out.dx = torch::stable::new_empty(a.saved, sizes_of(a.saved, a.saved.dim()), a.input_dtype);
    if (parameters) {
      out.dweight = parameter_gradient(a.weight, a.rstd);
      out.dbias = parameter_gradient(a.bias, a.rstd);
    }
    if (rows.columns == 0) return out;
    if (rows.count == 0) {
      if (parameters) torch::stable::zero_(out.dweight), torch::stable::zero_(out.dbias);
      return out;
    }
    BackwardTensors t{a, out.dx, out.dweight, out.dbias, rows, centered, parameters};
    // The kernels know these: all of one dtype; or a 16-bit dx with float32 parameters, and saved and grad in either.
    const ScalarType accumulate = accumulate_dtype(a.input_dtype);
    const ScalarType parameter = parameter_dtype(a.weight, a.bias, a.input_dtype);
    const bool narrow = parameter == a.input_dtype && a.saved.scalar_type() == parameter && a.grad.scalar_type() == parameter;
    const ScalarType p_dtype = narrow ? parameter : accumulate;
    ScalarType s_dtype = a.saved.scalar_type() == a.input_dtype ? a.input_dtype : accumulate;
    ScalarType g_dtype = a.grad.scalar_type() == a.input_dtype && s_dtype == a.input_dtype ? a.input_dtype : accumulate;
    t.inputs.saved = *dense_as(a.saved, s_dtype);
    t.inputs.grad = *dense_as(a.grad, g_dtype);
    t.inputs.rstd = dense(a.rstd);
    if (a.mean.has_value()) t.inputs.mean = dense(*a.mean);
    t.inputs.weight = dense_as(a.weight, p_dtype);
    t.inputs.bias = dense_as(a.bias, p_dtype);
    dispatch_float_or_double(a.input_dtype, a.op, "input_dtype", [&](auto zero) { backward_of<decltype(zero)>(t); });
    return out;
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) { APEXFX_REGISTER_NORMS(m, Cuda); }

}  // namespace norm
}  // namespace apexfx
