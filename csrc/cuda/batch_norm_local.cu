// Batch norm over the batch that is here, as one op forward and one backward on CUDA: the passes of batch_norm.cu, with
// one small kernel over the channels between or after them; formulas in csrc/batch_norm.h.
#include "batch_norm_cuda.h"

namespace apexfx {
namespace batch_norm {
namespace {

// stats -> mean and 1 / sqrt(var + eps).
__global__ void __launch_bounds__(kThreads)
    finish_stats_kernel(const double* __restrict__ stats, int64_t channels, double eps, double* __restrict__ mean,
                        double* __restrict__ invstd) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= channels) return;
  const Moments m = moments(stats[0], stats[1 + c], stats[1 + channels + c]);
  mean[c] = m.mean;
  invstd[c] = rsqrt(m.var + eps);
}

__global__ void __launch_bounds__(kThreads)
    parameter_gradients_kernel(const double* __restrict__ sums, const double* __restrict__ invstd, int64_t channels,
                               ChannelBuffer grad_weight, ChannelBuffer grad_bias) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= channels) return;
  if (grad_weight.data != nullptr)
    store_parameter(grad_weight.data, grad_weight.dtype, c, sums[channels + c] * invstd[c]);
  if (grad_bias.data != nullptr) store_parameter(grad_bias.data, grad_bias.dtype, c, sums[c]);
}

ChannelBuffer buffer_of(Tensor& t) { return {t.mutable_data_ptr(), t.scalar_type()}; }

unsigned blocks_of(int64_t channels) { return static_cast<unsigned>(divide_up(channels, kThreads)); }

struct Statistics {
  Tensor mean, invstd;
};

Statistics finish_stats(const Tensor& stats, double eps) {
  const int64_t channels = stats.size(0) / 2;
  Statistics out{torch::stable::new_empty(stats, {channels}), torch::stable::new_empty(stats, {channels})};
  if (channels == 0) return out;
  finish_stats_kernel<<<blocks_of(channels), kThreads, 0, current_stream(stats)>>>(
      stats.const_data_ptr<double>(), channels, eps, out.mean.mutable_data_ptr<double>(),
      out.invstd.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

std::tuple<Tensor, Tensor> bn_forward(const Tensor& x, Optional weight, Optional bias, Optional residual, double eps,
                                      bool relu) {
  const char* op = "bn_forward";
  check_affine(op, x, weight, bias);
  check(eps >= 0, op, "eps is ", eps, "; expected a number that is not negative");
  if (residual) check_like(op, "residual", *residual, x);
  const DeviceGuard guard(x.get_device_index());
  const Tensor stats = local_stats(x);
  const Statistics s = finish_stats(stats, eps);
  return {normalize(x, s.mean, s.invstd, weight, bias, residual, relu), stats};
}

// Room for the gradient of a parameter in its dtype; empty where there is none.
Tensor parameter_gradient(const Optional& parameter, const Tensor& stats) {
  if (!parameter) return torch::stable::new_empty(stats, {0});
  return torch::stable::new_empty(*parameter, {parameter->size(0)});
}

std::tuple<Tensor, Tensor, Tensor> bn_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                               Optional weight, Optional bias, double eps, bool relu, bool needs_x) {
  const char* op = "bn_backward";
  check_affine(op, x, weight, bias);
  check_like(op, "grad_output", grad, x);
  check_vector(op, "stats", stats, 2 * x.size(1) + 1, x, true);
  check(eps >= 0, op, "eps is ", eps, "; expected a number that is not negative");
  const DeviceGuard guard(x.get_device_index());
  Tensor saved = dense(stats);
  const Statistics s = finish_stats(saved, eps);
  const Tensor sums = backward_reduce(grad, x, s.mean, s.invstd, weight, bias, relu);
  const Tensor count = torch::stable::narrow(saved, 0, 0, 1);
  const Tensor dx = needs_x ? backward_elementwise(grad, x, s.mean, s.invstd, sums, count, weight, bias, relu)
                            : torch::stable::new_empty(x, {0});
  Tensor grad_weight = parameter_gradient(weight, saved), grad_bias = parameter_gradient(bias, saved);
  if (x.size(1) > 0 && (weight || bias)) {
    parameter_gradients_kernel<<<blocks_of(x.size(1)), kThreads, 0, current_stream(x)>>>(
        sums.const_data_ptr<double>(), s.invstd.const_data_ptr<double>(), x.size(1),
        weight ? buffer_of(grad_weight) : ChannelBuffer{}, bias ? buffer_of(grad_bias) : ChannelBuffer{});
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {dx, grad_weight, grad_bias};
}

}  // namespace
}  // namespace batch_norm
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) {
  m.impl("bn_forward", TORCH_BOX(&apexfx::batch_norm::bn_forward));
  m.impl("bn_backward", TORCH_BOX(&apexfx::batch_norm::bn_backward));
}
