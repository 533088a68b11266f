// The pieces of batch norm on CPU: x (N, C, ...) as N * C planes or, channels_last, as rows of C; formulas in
// csrc/batch_norm.h.
#include "batch_norm_passes.h"
#include "huge_pages.h"

namespace apexfx {
namespace batch_norm {

void move_running(const double* stats, int64_t channels, const Optional& tracked, std::optional<double> momentum,
                  Tensor& new_mean, Tensor& new_var) {
  const double given = momentum ? *momentum : 1.0 / static_cast<double>(*tracked->const_data_ptr<int64_t>());
  const double share = stats[0] > 0 ? given : 0;
  Doubles means(channels), vars(channels);
  channel_unbiased(stats[0], stats + 1, stats + 1 + channels, means.data(), vars.data(), channels);
  const auto move = [&](Tensor& running, const Doubles& batch) {
    const ScalarType dtype = running.scalar_type();
    if (dtype == ScalarType::Double) {
      channel_moved(batch.data(), share, running.mutable_data_ptr<double>(), channels);
      return;
    }
    std::vector<float> scratch(dtype == ScalarType::Float ? 0 : channels);
    float* values = const_cast<float*>(load(running.mutable_data_ptr(), dtype, scratch.data(), channels));
    channel_moved(batch.data(), share, values, channels);
    store(values, running.mutable_data_ptr(), dtype, channels);
  };
  move(new_mean, means);
  move(new_var, vars);
}

namespace {

Tensor local_stats(const Tensor& x) {
  check_input("bn_local_stats", x);
  Tensor stats = new_zeros(2 * x.size(1) + 1);
  if (x.numel() == 0) return stats;
  const Walk walk(x);
  double* out = stats.mutable_data_ptr<double>();
  out[0] = static_cast<double>(walk.layout().per_channel());
  dispatch_float_or_double(x.scalar_type(), "bn_local_stats", "x", [&](auto element) {
    add_sums(walk.layout(), static_cast<const decltype(element)*>(walk.x().const_data_ptr()), out + 1);
  });
  return stats;
}

std::tuple<Tensor, Tensor> global_stats(const Tensor& stats, double eps) {
  check_stats("bn_global_stats", stats);
  check(eps >= 0, "bn_global_stats", "eps is ", eps, "; expected a number that is not negative");
  const int64_t channels = stats.size(0) / 2;
  const Tensor given = dense(stats);
  const double* s = given.const_data_ptr<double>();
  Tensor mean = new_vector(channels, ScalarType::Double), invstd = new_vector(channels, ScalarType::Double);
  channel_moments(s[0], s + 1, s + 1 + channels, eps, mean.mutable_data_ptr<double>(),
                  invstd.mutable_data_ptr<double>(), channels);
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> running_stats(const Tensor& stats, const Tensor& mean, const Tensor& var, Optional tracked,
                                         std::optional<double> momentum) {
  check_running("bn_running_stats", stats, mean, var, tracked, momentum);
  const int64_t channels = stats.size(0) / 2;
  const Tensor given = dense(stats);
  Tensor new_mean = new_vector(channels, mean.scalar_type()), new_var = new_vector(channels, var.scalar_type());
  torch::stable::copy_(new_mean, mean);
  torch::stable::copy_(new_var, var);
  move_running(given.const_data_ptr<double>(), channels, tracked, momentum, new_mean, new_var);
  return {new_mean, new_var};
}

Tensor normalize(const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight, Optional bias,
                 Optional residual, bool relu) {
  const char* op = "bn_normalize";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  if (residual) check_like(op, "residual", *residual, x);
  if (x.numel() == 0) return torch::stable::empty_like(x);
  const Walk walk(x);
  Tensor y = on_huge_pages(walk.output());
  if (residual) residual = walk.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const ChannelConstants<E> constants(parameters, repeat_of(walk.layout()), relu);
    normalize_all<E>(walk.layout(), constants, static_cast<const E*>(walk.x().const_data_ptr()),
                     residual ? static_cast<const E*>(residual->const_data_ptr()) : nullptr,
                     static_cast<E*>(y.mutable_data_ptr()));
  });
  return walk.finish(y);
}

Tensor backward_reduce(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight,
                       Optional bias, bool relu) {
  const char* op = "bn_backward_reduce";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  check_like(op, "grad_output", grad, x);
  const int64_t channels = x.size(1);
  Tensor sums = new_zeros(2 * channels);
  if (x.numel() == 0) return sums;
  const Walk walk(x);
  const Tensor g = walk.alike(grad);
  double* out = sums.mutable_data_ptr<double>();
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const ChannelConstants<E> constants(parameters, repeat_of(walk.layout()), relu);
    add_gradient_sums<E>(walk.layout(), constants, static_cast<const E*>(g.const_data_ptr()),
                         static_cast<const E*>(walk.x().const_data_ptr()), out);
    constants.recenter(parameters.mean.const_data_ptr<double>(), out, out + channels, 0, channels);
  });
  return sums;
}

Tensor backward_elementwise(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                            const Tensor& sums, const Tensor& count, Optional weight, Optional bias, bool relu) {
  const char* op = "bn_backward_elementwise";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  check_like(op, "grad_output", grad, x);
  check_vector(op, "sums", sums, 2 * x.size(1), x, true);
  check_vector(op, "count", count, 1, x, true);
  if (x.numel() == 0) return torch::stable::empty_like(x);
  const Walk walk(x);
  const Tensor g = walk.alike(grad), given = dense(sums);
  Tensor dx = on_huge_pages(walk.output());
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const ChannelConstants<E> constants(parameters, repeat_of(walk.layout()), relu,
                                        given.const_data_ptr<double>(), *count.const_data_ptr<double>());
    gradient_all<E>(walk.layout(), constants, static_cast<const E*>(g.const_data_ptr()),
                    static_cast<const E*>(walk.x().const_data_ptr()), static_cast<E*>(dx.mutable_data_ptr()));
  });
  return walk.finish(dx);
}

}  // namespace
}  // namespace batch_norm
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) {
  m.impl("bn_local_stats", TORCH_BOX(&apexfx::batch_norm::local_stats));
  m.impl("bn_global_stats", TORCH_BOX(&apexfx::batch_norm::global_stats));
  m.impl("bn_running_stats", TORCH_BOX(&apexfx::batch_norm::running_stats));
  m.impl("bn_normalize", TORCH_BOX(&apexfx::batch_norm::normalize));
  m.impl("bn_backward_reduce", TORCH_BOX(&apexfx::batch_norm::backward_reduce));
  m.impl("bn_backward_elementwise", TORCH_BOX(&apexfx::batch_norm::backward_elementwise));
}
