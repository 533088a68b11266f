// rms_norm(x: [rows, n]) -> y: [rows, n], rstd: [rows], and its backward; formulas in csrc/norm.h.
#include "norm_cuda.h"

namespace apexfx {
namespace {

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, Optional weight, int64_t num_dims, double eps,
                                    std::optional<ScalarType> dtype, bool) {
  auto out = norm::forward("rms_norm", x, weight, std::nullopt, num_dims, eps, dtype, false);
  return {out.y, out.rstd};
}

Tensor rms_norm_backward_input(const Tensor& grad, const Tensor& saved, const Tensor& rstd, Optional weight,
                               int64_t num_dims, double eps, bool from_output, ScalarType input_dtype) {
  return norm::backward({"rms_norm_backward_input", grad, saved, std::nullopt, rstd, weight, std::nullopt, num_dims, eps,
                         from_output, input_dtype}, false, false).dx;
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& saved, const Tensor& rstd,
                                             Optional weight, int64_t num_dims, double eps, bool from_output,
                                             ScalarType input_dtype) {
  auto out = norm::backward({"rms_norm_backward", grad, saved, std::nullopt, rstd, weight, std::nullopt, num_dims, eps,
                             from_output, input_dtype}, false, true);
  return {out.dx, out.dweight};
}

}  // namespace
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&apexfx::rms_norm));
  m.impl("rms_norm_backward_input", TORCH_BOX(&apexfx::rms_norm_backward_input));
  m.impl("rms_norm_backward", TORCH_BOX(&apexfx::rms_norm_backward));
}
