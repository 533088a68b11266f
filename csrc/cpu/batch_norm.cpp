// Batch norm on CPU, in pieces and, over the batch that is here, as one op forward and one backward: what the pieces
// compute, bit for bit. x (N, C, ...) is N * C planes or, channels_last, rows of C; formulas in csrc/batch_norm.h.
#include "batch_norm_passes.h"

namespace apexfx {
namespace batch_norm {
namespace {

template <typename E>
const E* data(const Tensor& t) {
  return static_cast<const E*>(t.const_data_ptr());
}
template <typename E>
E* writable(Tensor& t) {
  return static_cast<E*>(t.mutable_data_ptr());
}

// A vector on the CPU, not by way of the dispatcher, which costs as much as the loops of a small batch norm.
Tensor new_vector(int64_t length, ScalarType dtype) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  const int32_t type = dtype == ScalarType::Double ? aoti_torch_dtype_float64()
                       : dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Half ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &length, &stride, type, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor new_zeros(int64_t length) {
  Tensor out = new_vector(length, ScalarType::Double);
  std::fill_n(writable<double>(out), length, 0.0);
  return out;
}

void put(const Doubles& values, Tensor& out) {
  if (out.scalar_type() == ScalarType::Double) {
    std::copy(values.begin(), values.end(), writable<double>(out));
    return;
  }
  const std::vector<float> rounded(values.begin(), values.end());
  store(rounded.data(), out.mutable_data_ptr(), out.scalar_type(), static_cast<int64_t>(values.size()));
}

// Moves the running buffers, contiguous vectors, towards the batch's values.
void move_running(const double* stats, const Optional& tracked, std::optional<double> momentum, Tensor& running_mean,
                  Tensor& running_var) {
  const int64_t channels = running_mean.size(0);
  const double given = momentum ? *momentum : 1.0 / static_cast<double>(*tracked->const_data_ptr<int64_t>());
  const double share = stats[0] > 0 ? given : 0;
  Doubles mean = doubles(running_mean, channels, 0), var = doubles(running_var, channels, 0);
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(stats[0], stats[1 + c], stats[1 + channels + c]);
    mean[c] = moved(mean[c], m.mean, share);
    var[c] = moved(var[c], unbiased(m), share);
  }
  put(mean, running_mean);
  put(var, running_var);
}

void check_eps(const char* op, double eps) {
  check(eps >= 0, op, "eps is ", eps, "; expected a number that is not negative");
}

// ---- the pieces -----------------------------------------------------------------------------------------------------

// out (2C) += [sum x, sum x^2]
template <typename E>
void add_all_sums(const Passes& passes, const E* x, double* out) {
  passes.sum_all(out, [&](auto... part) { passes.sums(x, part...); });
}

// out (2C) += [sum g, sum g * (x - center)]
template <typename E>
void add_all_gradient_sums(const Passes& passes, const ChannelConstants<E>& constants, const E* grad, const E* x,
                           double* out) {
  passes.sum_all(out, [&](auto... part) { passes.gradient_sums(constants, grad, x, part...); });
}

template <typename E>
void normalize_all(const Passes& passes, const ChannelConstants<E>& constants, const E* x, const E* residual, E* y) {
  passes.for_all([&](auto... part) { passes.normalize(constants, x, residual, y, part...); });
}

template <typename E>
void gradient_all(const Passes& passes, const ChannelConstants<E>& constants, const E* grad, const E* x, E* dx) {
  passes.for_all([&](auto... part) { passes.gradient(constants, grad, x, dx, part...); });
}

// The constants of a normalization by given statistics, and (with `sums`) of its gradient.
template <typename E>
ChannelConstants<E> constants_of(const Parameters& p, const Layout& layout, bool relu, const double* sums = nullptr,
                                 double count = 1) {
  ChannelConstants<E> constants(layout, p.weight, p.bias, relu);
  const int64_t channels = layout.channels;
  const double *mean = data<double>(p.mean), *invstd = data<double>(p.invstd);
  constants.set(mean, invstd, 0, channels);
  if (sums != nullptr) constants.set_gradient(mean, invstd, sums, sums + channels, count, 0, channels);
  constants.tile();
  return constants;
}

Tensor local_stats(const Tensor& x) {
  check_input("bn_local_stats", x);
  Tensor stats = new_zeros(2 * x.size(1) + 1);
  if (x.numel() == 0) return stats;
  const DenseInput input(x);
  double* out = writable<double>(stats);
  out[0] = static_cast<double>(input.layout().per_channel());
  dispatch_float_or_double(x.scalar_type(), "bn_local_stats", "x", [&](auto element) {
    add_all_sums(Passes(input.layout()), data<decltype(element)>(input.x()), out + 1);
  });
  return stats;
}

std::tuple<Tensor, Tensor> global_stats(const Tensor& stats, double eps) {
  check_stats("bn_global_stats", stats);
  check_eps("bn_global_stats", eps);
  const int64_t channels = stats.size(0) / 2;
  const Tensor given = dense(stats);
  const double* s = data<double>(given);
  Tensor mean = new_vector(channels, ScalarType::Double), invstd = new_vector(channels, ScalarType::Double);
  channel_moments(s[0], s + 1, s + 1 + channels, eps, writable<double>(mean), writable<double>(invstd), channels);
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> running_stats(const Tensor& stats, const Tensor& mean, const Tensor& var, Optional tracked,
                                         std::optional<double> momentum) {
  check_running("bn_running_stats", stats, mean, var, tracked, momentum);
  const Tensor given = dense(stats);
  Tensor new_mean = new_vector(mean.size(0), mean.scalar_type()), new_var = new_vector(var.size(0), var.scalar_type());
  torch::stable::copy_(new_mean, mean);
  torch::stable::copy_(new_var, var);
  move_running(data<double>(given), tracked, momentum, new_mean, new_var);
  return {new_mean, new_var};
}

Tensor normalize(const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight, Optional bias,
                 Optional residual, bool relu) {
  const char* op = "bn_normalize";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  if (residual) check_like(op, "residual", *residual, x);
  if (x.numel() == 0) return torch::stable::empty_like(x);
  const DenseInput input(x);
  Tensor y = input.output();
  if (residual) residual = input.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    normalize_all(Passes(input.layout()), constants_of<E>(parameters, input.layout(), relu), data<E>(input.x()),
                  residual ? data<E>(*residual) : nullptr, writable<E>(y));
  });
  return input.finish(y);
}

Tensor backward_reduce(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight,
                       Optional bias, bool relu) {
  const char* op = "bn_backward_reduce";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  check_like(op, "grad_output", grad, x);
  const int64_t channels = x.size(1);
  Tensor sums = new_zeros(2 * channels);
  if (x.numel() == 0) return sums;
  const DenseInput input(x);
  const Tensor g = input.alike(grad);
  double* out = writable<double>(sums);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const auto constants = constants_of<E>(parameters, input.layout(), relu);
    add_all_gradient_sums(Passes(input.layout()), constants, data<E>(g), data<E>(input.x()), out);
    constants.recenter(data<double>(parameters.mean), out, out + channels, 0, channels);
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
  const DenseInput input(x);
  const Tensor g = input.alike(grad), given = dense(sums);
  Tensor dx = input.output();
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const auto constants =
        constants_of<E>(parameters, input.layout(), relu, data<double>(given), *data<double>(count));
    gradient_all(Passes(input.layout()), constants, data<E>(g), data<E>(input.x()), writable<E>(dx));
  });
  return input.finish(dx);
}

// ---- over the batch that is here ------------------------------------------------------------------------------------

// Planes of a few channels at a time (`block`) are normalized while what their statistics read is still in a cache:
// f(first channel, channels) for all.
template <typename F>
void for_channels(const Layout& layout, int64_t block, F&& f) {
  parallel(divide_up(layout.channels, block), block * layout.per_channel(), [&](int64_t i) {
    const int64_t first = i * block;
    f(first, std::min(block, layout.channels - first));
  });
}

template <typename E>
void forward_into(const Layout& layout, ChannelConstants<E>& constants, double eps, const E* x, const E* residual, E* y,
                  double* stats) {
  const double count = static_cast<double>(layout.per_channel());
  double *total = stats + 1, *of_squares = total + layout.channels;
  Doubles mean(layout.channels), invstd(layout.channels);
  stats[0] = count;
  const auto set = [&](int64_t first, int64_t n) {
    channel_moments(count, total + first, of_squares + first, eps, &mean[first], &invstd[first], n);
    constants.set(&mean[first], &invstd[first], first, n);
  };
  const Passes passes(layout);
  const int64_t block = passes.cached_channels<E>(residual == nullptr ? 2 : 3);
  if (block == 0) {
    add_all_sums(passes, x, total);
    set(0, layout.channels);
    constants.tile();
    return normalize_all(passes, constants, x, residual, y);
  }
  for_channels(layout, block, [&](int64_t first, int64_t n) {
    for (int64_t segment = 0; segment < passes.segments(); ++segment)
      passes.sums(x, segment, first, n, total + first, of_squares + first);
    set(first, n);
    for (int64_t segment = passes.segments(); segment-- > 0;)
      passes.normalize(constants, x, residual, y, segment, first, n);
  });
}

// sums (2C) = [sum g, sum g * (x - mean)]; no dx where that is null
template <typename E>
void backward_into(const Layout& layout, ChannelConstants<E>& constants, double count, const double* mean,
                   const double* invstd, const E* grad, const E* x, E* dx, double* sums) {
  double *total = sums, *centered = sums + layout.channels;
  const auto set_gradient = [&](int64_t first, int64_t n) {
    constants.recenter(mean + first, total + first, centered + first, first, n);
    constants.set_gradient(mean + first, invstd + first, total + first, centered + first, count, first, n);
  };
  const Passes passes(layout);
  const int64_t block = dx == nullptr ? 0 : passes.cached_channels<E>(3);
  if (block == 0) {
    add_all_gradient_sums(passes, constants, grad, x, sums);
    set_gradient(0, layout.channels);
    constants.tile();
    if (dx != nullptr) gradient_all(passes, constants, grad, x, dx);
    return;
  }
  for_channels(layout, block, [&](int64_t first, int64_t n) {
    for (int64_t segment = 0; segment < passes.segments(); ++segment)
      passes.gradient_sums(constants, grad, x, segment, first, n, total + first, centered + first);
    set_gradient(first, n);
    for (int64_t segment = passes.segments(); segment-- > 0;)
      passes.gradient(constants, grad, x, dx, segment, first, n);
  });
}

std::tuple<Tensor, Tensor> bn_forward(const Tensor& x, Optional weight, Optional bias, Optional residual, double eps,
                                      bool relu) {
  const char* op = "bn_forward";
  check_affine(op, x, weight, bias);
  check_eps(op, eps);
  if (residual) check_like(op, "residual", *residual, x);
  Tensor stats = new_zeros(2 * x.size(1) + 1);
  if (x.numel() == 0) return {torch::stable::empty_like(x), stats};
  const DenseInput input(x);
  Tensor y = input.output();
  if (residual) residual = input.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    ChannelConstants<E> constants(input.layout(), dense(weight), dense(bias), relu);
    forward_into<E>(input.layout(), constants, eps, data<E>(input.x()), residual ? data<E>(*residual) : nullptr,
                    writable<E>(y), writable<double>(stats));
  });
  return {input.finish(y), stats};
}

// The gradient of a parameter in its dtype; empty where there is none.
Tensor parameter_gradient(const Optional& parameter, const Doubles& values) {
  if (!parameter) return new_vector(0, ScalarType::Double);
  Tensor out = new_vector(static_cast<int64_t>(values.size()), parameter->scalar_type());
  put(values, out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> bn_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                               Optional weight, Optional bias, double eps, bool relu, bool needs_x) {
  const char* op = "bn_backward";
  check_affine(op, x, weight, bias);
  check_like(op, "grad_output", grad, x);
  const int64_t channels = x.size(1);
  check_vector(op, "stats", stats, 2 * channels + 1, x, true);
  check_eps(op, eps);
  const Tensor saved = dense(stats);
  const double* s = data<double>(saved);
  Doubles sums(2 * channels, 0.0), mean(channels), invstd(channels);
  channel_moments(s[0], s + 1, s + 1 + channels, eps, mean.data(), invstd.data(), channels);
  const DenseInput input(x);
  const Tensor g = input.alike(grad);
  Tensor dx = needs_x ? input.output() : new_vector(0, x.scalar_type());
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    if (x.numel() == 0) return;
    ChannelConstants<E> constants(input.layout(), dense(weight), dense(bias), relu);
    constants.set(mean.data(), invstd.data(), 0, channels);
    constants.tile();
    backward_into<E>(input.layout(), constants, s[0], mean.data(), invstd.data(), data<E>(g), data<E>(input.x()),
                     needs_x ? writable<E>(dx) : nullptr, sums.data());
  });
  Doubles grad_weight(channels), grad_bias(sums.begin(), sums.begin() + channels);
  for (int64_t c = 0; c < channels; ++c) grad_weight[c] = sums[channels + c] * invstd[c];
  return {needs_x ? input.finish(dx) : dx, parameter_gradient(weight, grad_weight), parameter_gradient(bias, grad_bias)};
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
  m.impl("bn_forward", TORCH_BOX(&apexfx::batch_norm::bn_forward));
  m.impl("bn_backward", TORCH_BOX(&apexfx::batch_norm::bn_backward));
}
