// Batch norm over the batch that is here, as one op forward and one backward: what the pieces in batch_norm.cpp
// compute, bit for bit. Planes of a few channels at a time are normalized while what their statistics read is still in
// a cache.
#include "batch_norm_passes.h"
#include "huge_pages.h"

namespace apexfx {
namespace batch_norm {
namespace {

constexpr int64_t kCache = 512 * 1024;  // bytes of all operands that a task finds again

constexpr int64_t ceil(int64_t n, int64_t by) { return (n + by - 1) / by; }

// How many channels to take together so that `operands` tensors of E stay in a cache; 0 where whole channels are too
// large for it, or too few to share among the threads.
template <typename E>
int64_t cached_channels(const Planes& planes, int64_t operands) {
  const int64_t bytes = planes.per_channel() * operands * static_cast<int64_t>(sizeof(E));
  if (bytes > 2 * kCache) return 0;
  const int64_t threads = torch::stable::get_num_threads();
  if (planes.channels() < threads && planes.segments() > 1) return 0;
  const int64_t most = std::max<int64_t>(1, kCache / bytes), rounds = ceil(planes.channels(), most * threads);
  return ceil(planes.channels(), rounds * threads);  // as many for each thread
}

// Runs f(first channel, channels) for all, `block` at a time.
template <typename F>
void for_channels(const Planes& planes, int64_t block, F&& f) {
  parallel(ceil(planes.channels(), block), block * planes.per_channel(), [&](int64_t i) {
    const int64_t first = i * block;
    f(first, std::min(block, planes.channels() - first));
  });
}

template <typename E>
void forward_into(const Layout& layout, ChannelConstants<E>& constants, double eps, const E* x, const E* residual, E* y,
                  double* stats) {
  const int64_t channels = layout.channels;
  const double count = static_cast<double>(layout.per_channel());
  double *total = stats + 1, *of_squares = total + channels;
  Doubles mean(channels), invstd(channels);
  stats[0] = count;
  const auto set = [&](int64_t first, int64_t n) {
    channel_moments(count, total + first, of_squares + first, eps, &mean[first], &invstd[first], n);
    constants.set(&mean[first], &invstd[first], first, n);
  };
  const Planes planes(layout);
  const int64_t block = layout.channels_last ? 0 : cached_channels<E>(planes, residual == nullptr ? 2 : 3);
  if (block == 0) {
    add_sums(layout, x, total);
    set(0, channels);
    constants.tile();
    normalize_all(layout, constants, x, residual, y);
    return;
  }
  for_channels(planes, block, [&](int64_t first, int64_t n) {
    for (int64_t segment = 0; segment < planes.segments(); ++segment)
      planes.sums(x, segment, first, n, total + first, of_squares + first);
    set(first, n);
    for (int64_t segment = planes.segments(); segment-- > 0;)
      planes.normalize(constants, x, residual, y, segment, first, n);
  });
}

// sums (2C) = [sum g, sum g * (x - mean)]; no dx where that is null
template <typename E>
void backward_into(const Layout& layout, ChannelConstants<E>& constants, double count, const double* mean,
                   const double* invstd, const E* grad, const E* x, E* dx, double* sums) {
  const int64_t channels = layout.channels;
  double *total = sums, *centered = sums + channels;
  const auto set_gradient = [&](int64_t first, int64_t n) {
    constants.recenter(mean + first, total + first, centered + first, first, n);
    constants.set_gradient(mean + first, invstd + first, total + first, centered + first, count, first, n);
  };
  const Planes planes(layout);
  const int64_t block = layout.channels_last || dx == nullptr ? 0 : cached_channels<E>(planes, 3);
  if (block == 0) {
    add_gradient_sums(layout, constants, grad, x, sums);
    if (dx == nullptr) return constants.recenter(mean, total, centered, 0, channels);
    set_gradient(0, channels);
    constants.tile();
    gradient_all(layout, constants, grad, x, dx);
    return;
  }
  for_channels(planes, block, [&](int64_t first, int64_t n) {
    for (int64_t segment = 0; segment < planes.segments(); ++segment)
      planes.gradient_sums(constants, grad, x, segment, first, n, total + first, centered + first);
    set_gradient(first, n);
    for (int64_t segment = planes.segments(); segment-- > 0;)
      planes.gradient(constants, grad, x, dx, segment, first, n);
  });
}

std::tuple<Tensor, Tensor> forward(const char* op, const Tensor& x, const Optional& weight, const Optional& bias,
                                   Optional residual, double eps, bool relu) {
  check_affine(op, x, weight, bias);
  check(eps >= 0, op, "eps is ", eps, "; expected a number that is not negative");
  if (residual) check_like(op, "residual", *residual, x);
  Tensor stats = new_zeros(2 * x.size(1) + 1);
  if (x.numel() == 0) return {torch::stable::empty_like(x), stats};
  const Walk walk(x);
  const Layout& layout = walk.layout();
  Tensor y = on_huge_pages(walk.output());
  if (residual) residual = walk.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    ChannelConstants<E> constants(dense(weight), dense(bias), layout.channels, repeat_of(layout), relu);
    forward_into<E>(layout, constants, eps, static_cast<const E*>(walk.x().const_data_ptr()),
                    residual ? static_cast<const E*>(residual->const_data_ptr()) : nullptr,
                    static_cast<E*>(y.mutable_data_ptr()), stats.mutable_data_ptr<double>());
  });
  return {walk.finish(y), stats};
}

std::tuple<Tensor, Tensor> bn_forward(const Tensor& x, Optional weight, Optional bias, Optional residual, double eps,
                                      bool relu) {
  return forward("bn_forward", x, weight, bias, residual, eps, relu);
}

std::tuple<Tensor, Tensor> bn_forward_(const Tensor& x, Optional weight, Optional bias, Tensor running_mean,
                                       Tensor running_var, Optional tracked, std::optional<double> momentum,
                                       Optional residual, double eps, bool relu) {
  const char* op = "bn_forward_";
  check_input(op, x);
  check_running_buffers(op, x, x.size(1), running_mean, running_var, tracked, momentum);
  const auto result = forward(op, x, weight, bias, residual, eps, relu);
  Tensor new_mean = dense(running_mean), new_var = dense(running_var);
  move_running(std::get<1>(result).const_data_ptr<double>(), x.size(1), tracked, momentum, new_mean, new_var);
  if (!running_mean.is_contiguous()) torch::stable::copy_(running_mean, new_mean);
  if (!running_var.is_contiguous()) torch::stable::copy_(running_var, new_var);
  return result;
}

// The gradient of a parameter in its dtype; empty where there is none.
Tensor parameter_gradient(const Optional& parameter, const Doubles& values) {
  const int64_t n = static_cast<int64_t>(values.size());
  if (!parameter) return new_vector(0, ScalarType::Double);
  Tensor out = new_vector(n, parameter->scalar_type());
  if (parameter->scalar_type() == ScalarType::Double) {
    std::copy_n(values.data(), n, out.mutable_data_ptr<double>());
  } else {
    const std::vector<float> rounded(values.begin(), values.end());
    store(rounded.data(), out.mutable_data_ptr(), parameter->scalar_type(), n);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> bn_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                               Optional weight, Optional bias, double eps, bool relu, bool needs_x) {
  const char* op = "bn_backward";
  check_affine(op, x, weight, bias);
  check_like(op, "grad_output", grad, x);
  const int64_t channels = x.size(1);
  check_vector(op, "stats", stats, 2 * channels + 1, x, true);
  check(eps >= 0, op, "eps is ", eps, "; expected a number that is not negative");
  const Tensor saved = dense(stats);
  const double* s = saved.const_data_ptr<double>();
  Doubles sums(2 * channels, 0.0), mean(channels), invstd(channels);
  channel_moments(s[0], s + 1, s + 1 + channels, eps, mean.data(), invstd.data(), channels);
  const Walk walk(x);
  const Layout& layout = walk.layout();
  const Tensor g = walk.alike(grad);
  Tensor dx = needs_x ? on_huge_pages(walk.output()) : new_vector(0, x.scalar_type());
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    if (x.numel() == 0) return;
    ChannelConstants<E> constants(dense(weight), dense(bias), channels, repeat_of(layout), relu, needs_x);
    constants.set(mean.data(), invstd.data(), 0, channels);
    constants.tile();
    backward_into<E>(layout, constants, s[0], mean.data(), invstd.data(), static_cast<const E*>(g.const_data_ptr()),
                     static_cast<const E*>(walk.x().const_data_ptr()),
                     needs_x ? static_cast<E*>(dx.mutable_data_ptr()) : nullptr, sums.data());
  });
  Doubles grad_weight(channels), grad_bias(sums.begin(), sums.begin() + channels);
  for (int64_t c = 0; c < channels; ++c) grad_weight[c] = sums[channels + c] * invstd[c];
  return {needs_x ? walk.finish(dx) : dx, parameter_gradient(weight, grad_weight), parameter_gradient(bias, grad_bias)};
}

}  // namespace
}  // namespace batch_norm
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) {
  m.impl("bn_forward", TORCH_BOX(&apexfx::batch_norm::bn_forward));
  m.impl("bn_forward_", TORCH_BOX(&apexfx::batch_norm::bn_forward_));
  m.impl("bn_backward", TORCH_BOX(&apexfx::batch_norm::bn_backward));
}
