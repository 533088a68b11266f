// layer_norm(x: [rows, n]) -> y: [rows, n], mean: [rows], rstd: [rows], and its backward; formulas in csrc/norm.h.
#include "norm_cuda.h"

namespace apexfx {
namespace {

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, Optional weight, Optional bias, int64_t num_dims,
                                              double eps, std::optional<ScalarType> dtype, bool) {
  auto out = norm::forward("layer_norm", x, weight, bias, num_dims, eps, dtype, true);
  return {out.y, out.mean, out.rstd};
}

Tensor layer_norm_backward_input(const Tensor& grad, const Tensor& saved, Optional mean, const Tensor& rstd,
                                 Optional weight, Optional bias, int64_t num_dims, double eps, bool from_output,
                                 ScalarType input_dtype) {
  return norm::backward({"layer_norm_backward_input", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output,
                         input_dtype}, true, false).dx;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& saved, Optional mean,
                                                       const Tensor& rstd, Optional weight, Optional bias,
                                                       int64_t num_dims, double eps, bool from_output,
                                                       ScalarType input_dtype) {
  auto out = norm::backward({"layer_norm_backward", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output,
                             input_dtype}, true, true);
  return {out.dx, out.dweight, out.dbias};
}

}  // namespace
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&apexfx::layer_norm));
  m.impl("layer_norm_backward_input", TORCH_BOX(&apexfx::layer_norm_backward_input));
  m.impl("layer_norm_backward", TORCH_BOX(&apexfx::layer_norm_backward));
}
