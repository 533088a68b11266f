// The pieces of batch norm on CUDA: x (N, C, ...) as N * C planes, as N rows of C small planes or, channels_last, as rows of C;
// formulas in csrc/batch_norm.h.
#include <numeric>

#include "batch_norm_cuda.h"
#include "batch_norm_elementwise.cuh"
#include "batch_norm_reduce.cuh"

namespace apexfx {
namespace batch_norm {
namespace {

// Calls f(integral constant P) with the largest pack that divides `length` and fits every pointer's alignment.
template <typename E, typename F>
void with_pack(int64_t length, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int full = kPackSize<E>, half = full / 2;
  const auto fits = [&](int p) {
    bool aligned = length % p == 0;
    for (const void* pointer : pointers) aligned = aligned && is_aligned(pointer, p * sizeof(E));
    return aligned;
  };
  if (fits(full)) f(std::integral_constant<int, full>{});
  else if (half > 1 && fits(half)) f(std::integral_constant<int, half>{});
  else f(std::integral_constant<int, 1>{});
}

// The packs after which both a channel's plane and a pack end.
int64_t packs_of_whole_planes(int64_t length, int64_t pack) { return length / std::gcd(length, pack); }

// Whether planes are walked as rows of whole images: small ones, which as planes would leave threads without a pack, or the packs
// small. There have to be rows enough to share the constants of a pack's channels.
template <typename E>
bool has_small_planes(const Layout& layout, std::initializer_list<const void*> pointers) {
  constexpr int P = kPackSize<E>;
  bool fits = !layout.channels_last && layout.inner < 64 * P && layout.outer >= 16 &&
              layout.channels * layout.inner % P == 0 && packs_of_whole_planes(layout.inner, P) <= kThreads;
  for (const void* pointer : pointers) fits = fits && is_aligned(pointer);
  return fits;
}

// Calls rows(pack, bool constant kPlanes, RowShape) or planes(pack, PlaneShape), `pack` being an integral constant: how the layout
// is walked in the largest packs that fit.
template <typename E, typename Rows, typename Planes>
void with_shape(const Layout& layout, std::initializer_list<const void*> pointers, Rows&& rows, Planes&& planes) {
  if (has_small_planes<E>(layout, pointers)) {
    constexpr int P = kPackSize<E>;
    const RowShape shape{layout.outer, layout.channels * layout.inner / P,
                         static_cast<int>(layout.inner)};
    return rows(std::integral_constant<int, P>{}, std::true_type{}, shape);
  }
  with_pack<E>(layout.channels_last ? layout.channels : layout.inner, pointers, [&](auto pack) {
    constexpr int P = decltype(pack)::value;
    if (layout.channels_last) rows(pack, std::false_type{}, RowShape{layout.outer, layout.channels / P, 1});
    else planes(pack, PlaneShape{layout.outer, layout.channels, layout.inner / P});
  });
}

// Blocks of (packs of columns, rows), and how many of them share the rows: some waves of the whole device. A block's packs are a
// multiple of `whole`.
struct RowGrid {
  dim3 block, grid;
  RowGrid(const RowShape& shape, int64_t rows_per_thread, int64_t whole = 1) {
    unsigned width = static_cast<unsigned>(whole);
    while (width < 32 && width < shape.packs) width *= 2;
    block = dim3(width, kThreads / width);
    const int64_t columns = divide_up(shape.packs, width);
    const int64_t wanted = static_cast<int64_t>(multiprocessor_count()) * 8 / columns;  // no block more than the waves hold
    const int64_t most = divide_up(shape.rows, static_cast<int64_t>(block.y) * rows_per_thread);
    const int64_t shares = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, 65535));
    grid = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(shares));
  }
};

struct PlaneGrid {
  dim3 block, grid;
  PlaneGrid(const PlaneShape& shape, int packs_per_thread) {
    unsigned width = 32;
    while (width < kThreads && width * packs_per_thread < shape.packs) width *= 2;
    block = dim3(width, kThreads / width);
    grid = dim3(static_cast<unsigned>(divide_up(shape.outer * shape.channels, block.y)),
                static_cast<unsigned>(std::min<int64_t>(
                    divide_up(shape.packs, static_cast<int64_t>(width) * packs_per_thread), kMostBlocks)));
  }
};

// How many blocks share a channel of planes: of those that make up to four waves, the number whose last wave is fullest.
int64_t plane_splits(const PlaneShape& shape) {
  const int64_t slots = static_cast<int64_t>(multiprocessor_count()) * kPlaneBlocks;
  const int64_t useful = std::min<int64_t>(divide_up(shape.outer * shape.packs, kThreads * kGroup), 65535);
  const int64_t most = std::min(useful, std::max<int64_t>(4 * slots / shape.channels, 1));
  int64_t best = 1;
  const auto share = [&](int64_t splits) {
    const int64_t blocks = splits * shape.channels;
    return static_cast<double>(blocks) / static_cast<double>(divide_up(blocks, slots) * slots);
  };
  for (int64_t splits = 2; splits <= most; ++splits)
    if (share(splits) > share(best)) best = splits;
  return best;
}

PlaneStep step_of(const PlaneShape& shape, int64_t splits) {
  return {splits * kThreads / shape.packs, splits * kThreads % shape.packs};
}

// Runs launch(partial) with room for `splits` partial results of `length`, and adds them up into `out`.
template <typename F>
void add_up(const Tensor& like, int64_t splits, int64_t length, double* out, cudaStream_t stream, F&& launch) {
  if (splits == 1) {
    launch(out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  Tensor partial = torch::stable::new_empty(like, {splits * length}, ScalarType::Double);
  double* data = partial.mutable_data_ptr<double>();
  launch(data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  add_splits_kernel<<<static_cast<unsigned>(divide_up(length, 32)), dim3(32, kSplitRows), 0, stream>>>(
      data, static_cast<int>(splits), length, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

ChannelVectors vectors_of(const Parameters& p, const double* sums = nullptr, const double* count = nullptr) {
  return {p.mean.const_data_ptr<double>(), p.invstd.const_data_ptr<double>(),
          p.weight ? p.weight->const_data_ptr() : nullptr, p.bias ? p.bias->const_data_ptr() : nullptr,
          p.weight ? p.weight->scalar_type() : ScalarType::Float, p.bias ? p.bias->scalar_type() : ScalarType::Float,
          sums, count, p.mean.size(0)};
}

}  // namespace

Tensor local_stats(const Tensor& x) {
  check_input("bn_local_stats", x);
  const DeviceGuard guard(x.get_device_index());
  const int64_t channels = x.size(1);
  if (x.numel() == 0) return torch::stable::new_zeros(x, {2 * channels + 1}, ScalarType::Double);
  Tensor stats = torch::stable::new_empty(x, {2 * channels + 1}, ScalarType::Double);
  const DenseInput input(x);
  const Layout& layout = input.layout();
  const cudaStream_t stream = current_stream(x);
  double *count = stats.mutable_data_ptr<double>(), *out = count + 1;
  dispatch_float_or_double(x.scalar_type(), "bn_local_stats", "x", [&](auto element) {
    using E = decltype(element);
    const E* data = static_cast<const E*>(input.x().const_data_ptr());
    const auto rows = [&](auto pack, auto planes, const RowShape& shape) {
      constexpr int P = decltype(pack)::value;
      constexpr bool kPlanes = decltype(planes)::value;
      const RowGrid grid(shape, kSumRows<P>, packs_of_whole_planes(shape.length, P));
      add_up(x, grid.grid.y, 2 * channels, out, stream, [&](double* partial) {
        row_sums_kernel<E, P, kPlanes><<<grid.grid, grid.block, 0, stream>>>(data, shape, partial, count);
      });
    };
    with_shape<E>(layout, {data}, rows, [&](auto pack, const PlaneShape& shape) {
      constexpr int P = decltype(pack)::value;
      const dim3 grid(static_cast<unsigned>(channels), static_cast<unsigned>(plane_splits(shape)));
      add_up(x, grid.y, 2 * channels, out, stream, [&](double* partial) {
        plane_sums_kernel<E, P><<<grid, kThreads, 0, stream>>>(data, shape, step_of(shape, grid.y), partial, count);
      });
    });
  });
  return stats;
}

namespace {

__global__ void global_stats_kernel(const double* __restrict__ stats, int64_t channels, double eps,
                                    double* __restrict__ mean, double* __restrict__ invstd) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= channels) return;
  const Moments m = moments(stats[0], stats[1 + c], stats[1 + channels + c]);
  mean[c] = m.mean;
  invstd[c] = rsqrt(m.var + eps);
}

std::tuple<Tensor, Tensor> global_stats(const Tensor& stats, double eps) {
  check_stats("bn_global_stats", stats);
  check(eps >= 0, "bn_global_stats", "eps is ", eps, "; expected a number that is not negative");
  const DeviceGuard guard(stats.get_device_index());
  const int64_t channels = stats.size(0) / 2;
  Tensor mean = torch::stable::new_empty(stats, {channels}), invstd = torch::stable::new_empty(stats, {channels});
  if (channels == 0) return {mean, invstd};
  const Tensor given = dense(stats);
  double *means = mean.mutable_data_ptr<double>(), *invstds = invstd.mutable_data_ptr<double>();
  global_stats_kernel<<<static_cast<unsigned>(divide_up(channels, kThreads)), kThreads, 0, current_stream(stats)>>>(
      given.const_data_ptr<double>(), channels, eps, means, invstds);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {mean, invstd};
}

__global__ void running_stats_kernel(const double* __restrict__ stats, int64_t channels, ChannelBuffer mean,
                                     ChannelBuffer var, double momentum, const int64_t* __restrict__ tracked) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= channels) return;
  const Moments m = moments(stats[0], stats[1 + c], stats[1 + channels + c]);
  move_running(stats[0], m, mean, var, c, momentum, tracked);
}

std::tuple<Tensor, Tensor> running_stats(const Tensor& stats, const Tensor& mean, const Tensor& var, Optional tracked,
                                         std::optional<double> momentum) {
  check_running("bn_running_stats", stats, mean, var, tracked, momentum);
  const DeviceGuard guard(stats.get_device_index());
  const int64_t channels = stats.size(0) / 2;
  Tensor new_mean = torch::stable::new_empty(mean, {channels}), new_var = torch::stable::new_empty(var, {channels});
  if (channels == 0) return {new_mean, new_var};
  torch::stable::copy_(new_mean, mean);
  torch::stable::copy_(new_var, var);
  const Tensor given = dense(stats);
  running_stats_kernel<<<static_cast<unsigned>(divide_up(channels, kThreads)), kThreads, 0, current_stream(stats)>>>(
      given.const_data_ptr<double>(), channels, {new_mean.mutable_data_ptr(), mean.scalar_type()},
      {new_var.mutable_data_ptr(), var.scalar_type()}, momentum.value_or(0),
      momentum ? nullptr : tracked->const_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {new_mean, new_var};
}

// Runs Op over rows or planes.
template <template <typename, int> class Op, typename E, int P, bool kPlanes>
void run_elementwise(const Op<E, P>& op, const RowShape& shape, cudaStream_t stream) {
  const RowGrid grid(shape, 4);
  row_kernel<Op, E, P, kPlanes><<<grid.grid, grid.block, 0, stream>>>(op, shape);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <template <typename, int> class Op, typename E, int P>
void run_elementwise(const Op<E, P>& op, const PlaneShape& shape, cudaStream_t stream) {
  const PlaneGrid grid(shape, kPacksInFlight<P>);
  plane_kernel<Op, E, P><<<grid.grid, grid.block, 0, stream>>>(op, shape);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Runs the Op that make(pack) returns over every element of a result laid out as `layout`.
template <template <typename, int> class Op, typename E, typename F>
void run_elementwise(const Layout& layout, std::initializer_list<const void*> pointers, cudaStream_t stream, F&& make) {
  const auto rows = [&](auto pack, auto planes, const RowShape& shape) {
    run_elementwise<Op, E, decltype(pack)::value, decltype(planes)::value>(make(pack), shape, stream);
  };
  with_shape<E>(layout, pointers, rows, [&](auto pack, const PlaneShape& shape) {
    run_elementwise<Op, E, decltype(pack)::value>(make(pack), shape, stream);
  });
}

}  // namespace

Tensor normalize(const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight, Optional bias,
                 Optional residual, bool relu) {
  const char* op = "bn_normalize";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  if (residual) check_like(op, "residual", *residual, x);
  if (x.numel() == 0) return torch::stable::empty_like(x);
  const DeviceGuard guard(x.get_device_index());
  const DenseInput input(x);
  const Layout& layout = input.layout();
  Tensor y = input.output();
  if (residual) residual = input.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const E* in = static_cast<const E*>(input.x().const_data_ptr());
    const E* added = residual ? static_cast<const E*>(residual->const_data_ptr()) : nullptr;
    E* out = static_cast<E*>(y.mutable_data_ptr());
    run_elementwise<Normalize, E>(layout, {in, added, out}, current_stream(x), [&](auto pack) {
      return Normalize<E, decltype(pack)::value>{vectors_of(parameters), in, added, out, relu};
    });
  });
  return input.finish(y);
}

Tensor backward_reduce(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight,
                       Optional bias, bool relu) {
  const char* op = "bn_backward_reduce";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  check_like(op, "grad_output", grad, x);
  const DeviceGuard guard(x.get_device_index());
  const int64_t channels = x.size(1);
  if (x.numel() == 0) return torch::stable::new_zeros(x, {2 * channels}, ScalarType::Double);
  Tensor sums = torch::stable::new_empty(x, {2 * channels}, ScalarType::Double);
  const DenseInput input(x);
  const Layout& layout = input.layout();
  const Tensor dense_grad = input.alike(grad);
  const cudaStream_t stream = current_stream(x);
  const ChannelVectors vectors = vectors_of(parameters);
  double* out = sums.mutable_data_ptr<double>();
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const E* in = static_cast<const E*>(input.x().const_data_ptr());
    const E* g = static_cast<const E*>(dense_grad.const_data_ptr());
    const auto rows = [&](auto pack, auto planes, const RowShape& shape) {
      constexpr int P = decltype(pack)::value;
      constexpr bool kPlanes = decltype(planes)::value;
      const RowGrid grid(shape, 4, packs_of_whole_planes(shape.length, P));
      add_up(x, grid.grid.y, 2 * channels, out, stream, [&](double* partial) {
        row_gradient_sums_kernel<E, P, kPlanes><<<grid.grid, grid.block, 0, stream>>>(g, in, shape, vectors, relu, partial);
      });
    };
    with_shape<E>(layout, {in, g}, rows, [&](auto pack, const PlaneShape& shape) {
      constexpr int P = decltype(pack)::value;
      const dim3 grid(static_cast<unsigned>(channels), static_cast<unsigned>(plane_splits(shape)));
      add_up(x, grid.y, 2 * channels, out, stream, [&](double* partial) {
        plane_gradient_sums_kernel<E, P><<<grid, kThreads, 0, stream>>>(g, in, shape, step_of(shape, grid.y), vectors, relu,
                                                                        partial);
      });
    });
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
  const DeviceGuard guard(x.get_device_index());
  const DenseInput input(x);
  const Layout& layout = input.layout();
  const Tensor dense_grad = input.alike(grad), given = dense(sums);
  const ChannelVectors vectors =
      vectors_of(parameters, given.const_data_ptr<double>(), count.const_data_ptr<double>());
  Tensor dx = input.output();
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const E* in = static_cast<const E*>(input.x().const_data_ptr());
    const E* g = static_cast<const E*>(dense_grad.const_data_ptr());
    E* out = static_cast<E*>(dx.mutable_data_ptr());
    run_elementwise<Gradient, E>(layout, {in, g, out}, current_stream(x), [&](auto pack) {
      return Gradient<E, decltype(pack)::value>{vectors, g, in, out, relu};
    });
  });
  return input.finish(dx);
}

}  // namespace batch_norm
}  // namespace apexfx

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) {
  m.impl("bn_local_stats", TORCH_BOX(&apexfx::batch_norm::local_stats));
  m.impl("bn_global_stats", TORCH_BOX(&apexfx::batch_norm::global_stats));
  m.impl("bn_running_stats", TORCH_BOX(&apexfx::batch_norm::running_stats));
  m.impl("bn_normalize", TORCH_BOX(&apexfx::batch_norm::normalize));
  m.impl("bn_backward_reduce", TORCH_BOX(&apexfx::batch_norm::backward_reduce));
  m.impl("bn_backward_elementwise", TORCH_BOX(&apexfx::batch_norm::backward_elementwise));
}
