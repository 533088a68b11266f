// Batch norm on CPU: x (N, C, ...) as N * C planes or, channels_last, as rows of C; formulas in csrc/batch_norm.h.
// Work is cut into pieces by the sizes alone, so results do not depend on the number of threads.
#include "batch_norm_loops.h"
#include "vector.h"

#include <cmath>

namespace apexfx {
namespace batch_norm {
namespace {

using Optional = std::optional<Tensor>;

constexpr int64_t kPiece = 64 * 1024;  // elements per task
constexpr int64_t kMinRows = 128;  // rows per task, where C is so large that fewer would do
constexpr int64_t kMaxRowPieces = 256;
constexpr int64_t kFlushRows = 64;  // rows added up in float before they go into a double

template <typename E>
using T = typename Compute<E>::type;
template <typename E>
constexpr bool kDirect = !std::is_same_v<E, Half>;  // the loops read and write it in memory

// What the loops are given: float16 goes through float scratch, bfloat16 is bits.
template <typename E>
struct InLoop {
  using type = E;
};
template <>
struct InLoop<Half> {
  using type = float;
};
template <>
struct InLoop<BFloat16> {
  using type = Bf16;
};
template <typename E>
using L = typename InLoop<E>::type;
template <typename E>
using Scratch = L<E>[kDirect<E> ? 1 : kBlock];

// n elements of `data` for a loop: in place, or converted into `scratch`.
template <typename E>
const L<E>* read(const E* data, L<E>* scratch, int64_t n) {
  if constexpr (kDirect<E>) return reinterpret_cast<const L<E>*>(data);
  else widen(data, scratch, n);
  return scratch;
}

// Where a loop writes n elements that belong at `data`; `write` then puts them there.
template <typename E>
L<E>* place(E* data, L<E>* scratch) {
  if constexpr (kDirect<E>) return reinterpret_cast<L<E>*>(data);
  else return scratch;
}
template <typename E>
void write(const L<E>* values, E* data, int64_t n) {
  if constexpr (!kDirect<E>) narrow(values, data, n);
}

// Calls f(offset, count) for blocks that fit a scratch buffer (everything at once where none is needed).
template <typename E, typename F>
void for_blocks(int64_t n, F&& f) {
  const int64_t step = kDirect<E> ? n : kBlock;
  for (int64_t begin = 0; begin < n; begin += step) f(begin, std::min(step, n - begin));
}

// The same for rows: f(offset, column, count), with whole rows (column 0) or a part of one.
template <typename E, typename F>
void for_row_blocks(int64_t n, int64_t width, F&& f) {
  if (kDirect<E> || width <= kBlock) {
    const int64_t step = kDirect<E> ? n : kBlock / width * width;
    for (int64_t begin = 0; begin < n; begin += step) f(begin, int64_t{0}, std::min(step, n - begin));
    return;
  }
  for (int64_t row = 0; row < n; row += width)
    for (int64_t column = 0; column < width; column += kBlock)
      f(row + column, column, std::min(kBlock, width - column));
}

template <typename F>
void parallel(int64_t tasks, int64_t elements_per_task, F&& f) {
  const int64_t grain = std::max<int64_t>(1, kPiece / 2 / std::max<int64_t>(1, elements_per_task));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Contiguous x: every plane in pieces of at most kPiece elements.
struct PlanePieces {
  int64_t per_plane, length, inner, count;
  explicit PlanePieces(const Layout& x)
      : per_plane((x.inner + kPiece - 1) / kPiece), length((x.inner + per_plane - 1) / per_plane), inner(x.inner),
        count(x.outer * x.channels * per_plane) {}
  int64_t plane(int64_t i) const { return per_plane == 1 ? i : i / per_plane; }  // a division costs a plane of 7 x 7
  int64_t inside(int64_t i) const { return per_plane == 1 ? 0 : i % per_plane * length; }
  int64_t begin(int64_t i) const { return plane(i) * inner + inside(i); }
  int64_t size(int64_t i) const { return std::min(length, inner - inside(i)); }
};

// Channels_last x: rows of C, taken `repeat` at a time where C is small, so that a loop over `width` fills registers.
struct RowPieces {
  int64_t channels, repeat, width, rows, count, total_rows;
  explicit RowPieces(const Layout& x)
      : channels(x.channels), repeat(std::max<int64_t>(1, 64 / x.channels)), width(repeat * channels),
        total_rows(x.outer) {
    rows = std::max({kPiece / channels, kMinRows, (total_rows + kMaxRowPieces - 1) / kMaxRowPieces});
    rows = std::max<int64_t>(1, rows / repeat) * repeat;
    count = (total_rows + rows - 1) / rows;
  }
  int64_t begin(int64_t i) const { return i * rows * channels; }
  int64_t num_rows(int64_t i) const { return std::min(rows, total_rows - i * rows); }
  int64_t size(int64_t i) const { return num_rows(i) * channels; }
};

std::vector<double> doubles(const Optional& vector, int64_t length, double otherwise) {
  std::vector<double> out(length, otherwise);
  if (!vector) return out;
  if (vector->scalar_type() == ScalarType::Double) {
    std::copy_n(vector->const_data_ptr<double>(), length, out.data());
    return out;
  }
  std::vector<float> scratch(length);
  std::copy_n(load(vector->const_data_ptr(), vector->scalar_type(), scratch.data(), length), length, out.data());
  return out;
}

// The constants of every channel, `repeat` times over.
template <typename E>
struct Constants {
  std::vector<T<E>> center, scale, shift, per_grad, per_x, constant;
  bool relu;

  Constants(const Parameters& p, int64_t channels, int64_t repeat, bool relu_, const double* sums = nullptr,
            double count = 1)
      : relu(relu_) {
    const auto mean = doubles(p.mean, channels, 0), invstd = doubles(p.invstd, channels, 1);
    const auto weight = doubles(p.weight, channels, 1), bias = doubles(p.bias, channels, 0);
    const int64_t n = channels * repeat;
    for (auto* v : {&center, &scale, &shift}) v->resize(n);
    if (sums != nullptr)
      for (auto* v : {&per_grad, &per_x, &constant}) v->resize(n);
    for (int64_t c = 0; c < channels; ++c) {
      const auto a = affine<T<E>>(mean[c], invstd[c], weight[c], bias[c]);
      center[c] = a.center, scale[c] = a.scale, shift[c] = a.shift;
      if (sums == nullptr) continue;
      const auto g = input_gradient<T<E>>(mean[c], invstd[c], weight[c], sums[c], sums[channels + c], count);
      per_grad[c] = g.per_grad, per_x[c] = g.per_x, constant[c] = g.constant;
    }
    for (auto* v : {&center, &scale, &shift, &per_grad, &per_x, &constant})
      for (int64_t i = channels; i < static_cast<int64_t>(v->size()); ++i) (*v)[i] = (*v)[i - channels];
  }

  Plane<T<E>> plane(int64_t c) const {
    Plane<T<E>> out{{center[c], scale[c], shift[c]}, {}, relu, largest_zero<E>()};
    if (!constant.empty()) out.gradient = {per_grad[c], per_x[c], constant[c]};
    return out;
  }

  Rows<T<E>> rows(int64_t column) const {
    const bool all = !constant.empty();
    return {center.data() + column, scale.data() + column, shift.data() + column,
            all ? per_grad.data() + column : nullptr, all ? per_x.data() + column : nullptr,
            all ? constant.data() + column : nullptr, relu, largest_zero<E>(),
            static_cast<int64_t>(center.size()) - column};
  }
};

// out[c] and out[C + c] = the pieces' pairs of channel c, added up in order.
void add_planes(const PlanePieces& pieces, const std::vector<double>& partial, int64_t channels, double* out) {
  for (int64_t i = 0; i < pieces.count;)
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < pieces.per_plane; ++k, ++i) {
        out[c] += partial[2 * i];
        out[channels + c] += partial[2 * i + 1];
      }
}

void add_rows(int64_t count, const std::vector<double>& partial, int64_t channels, double* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < 2 * channels; ++c) out[c] += partial[i * 2 * channels + c];
}

// Adds running sums of width into doubles of C, and clears them.
template <typename T>
void flush(std::vector<T>& from, double* into, int64_t channels) {
  for (size_t begin = 0; begin < from.size(); begin += channels)
    for (int64_t c = 0; c < channels; ++c) into[c] += static_cast<double>(from[begin + c]);
  std::fill(from.begin(), from.end(), T(0));
}

template <typename E>
void sums_of_planes(const E* x, const Layout& layout, double* out) {
  const PlanePieces pieces(layout);
  std::vector<double> partial(2 * pieces.count, 0.0);
  parallel(pieces.count, pieces.length, [&](int64_t i) {
    alignas(64) Scratch<E> scratch;
    for_blocks<E>(pieces.size(i), [&](int64_t offset, int64_t n) {
      plane_sums(read(x + pieces.begin(i) + offset, scratch, n), n, &partial[2 * i]);
    });
  });
  add_planes(pieces, partial, layout.channels, out);
}

// Runs f(element, total, of_squares) over blocks of the rows of piece i; its running sums end in `into` (2C).
template <typename E, typename F>
void sum_rows(const RowPieces& pieces, int64_t i, double* into, F&& f) {
  std::vector<T<E>> total(pieces.width, 0), product(pieces.width, 0);
  const int64_t step = kFlushRows * pieces.width, size = pieces.size(i);
  for (int64_t begin = 0; begin < size; begin += step) {
    for_row_blocks<E>(std::min(step, size - begin), pieces.width, [&](int64_t offset, int64_t column, int64_t n) {
      f(pieces.begin(i) + begin + offset, column, n, total.data() + column, product.data() + column);
    });
    flush(total, into, pieces.channels);
    flush(product, into + pieces.channels, pieces.channels);
  }
}

template <typename E>
void sums_of_rows(const E* x, const Layout& layout, double* out) {
  const RowPieces pieces(layout);
  const int64_t channels = layout.channels;
  std::vector<double> partial(2 * channels * pieces.count, 0.0);
  parallel(pieces.count, kPiece, [&](int64_t i) {
    alignas(64) Scratch<E> scratch;
    std::vector<T<E>> first(channels), shift(pieces.width);
    const E* row = x + pieces.begin(i);
    for (int64_t c = 0; c < channels; ++c) first[c] = static_cast<T<E>>(row[c]);
    double* sums = partial.data() + 2 * channels * i;
    const double num_rows = static_cast<double>(pieces.num_rows(i));
    const auto sum = [&] {
      for (int64_t r = 0; r < pieces.repeat; ++r) std::copy_n(first.data(), channels, shift.data() + r * channels);
      std::fill_n(sums, 2 * channels, 0.0);
      sum_rows<E>(pieces, i, sums, [&](int64_t at, int64_t column, int64_t n, T<E>* total, T<E>* squares) {
        row_sums(read(x + at, scratch, n), shift.data() + column, total, squares, pieces.width - column, n);
      });
    };
    sum();
    bool far = false;
    for (int64_t c = 0; c < channels; ++c) {
      if (!is_far(num_rows, sums[c], sums[channels + c])) continue;
      first[c] += static_cast<T<E>>(sums[c] / num_rows);
      far = true;
    }
    if (far) sum();
    for (int64_t c = 0; c < channels; ++c) {
      const Sums all = unshifted(num_rows, static_cast<double>(first[c]), sums[c], sums[channels + c]);
      sums[c] = all.total;
      sums[channels + c] = all.of_squares;
    }
  });
  add_rows(pieces.count, partial, channels, out);
}

Tensor local_stats(const Tensor& x) {
  check_input("bn_local_stats", x);
  Tensor stats = torch::stable::new_zeros(x, {2 * x.size(1) + 1}, ScalarType::Double);
  if (x.numel() == 0) return stats;
  const Walk walk(x);
  double* out = stats.mutable_data_ptr<double>();
  out[0] = static_cast<double>(walk.layout().per_channel());
  dispatch_float_or_double(x.scalar_type(), "bn_local_stats", "x", [&](auto element) {
    using E = decltype(element);
    const E* data = static_cast<const E*>(walk.x().const_data_ptr());
    if (walk.layout().channels_last) sums_of_rows(data, walk.layout(), out + 1);
    else sums_of_planes(data, walk.layout(), out + 1);
  });
  return stats;
}

std::tuple<Tensor, Tensor> global_stats(const Tensor& stats, double eps) {
  check_stats("bn_global_stats", stats);
  check(eps >= 0, "bn_global_stats", "eps is ", eps, "; expected a number that is not negative");
  const int64_t channels = stats.size(0) / 2;
  const auto s = doubles(torch::stable::contiguous(stats), 2 * channels + 1, 0);
  Tensor mean = torch::stable::new_empty(stats, {channels}), invstd = torch::stable::new_empty(stats, {channels});
  double *means = mean.mutable_data_ptr<double>(), *invstds = invstd.mutable_data_ptr<double>();
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(s[0], s[1 + c], s[1 + channels + c]);
    means[c] = m.mean;
    invstds[c] = 1 / std::sqrt(m.var + eps);
  }
  return {mean, invstd};
}

// The old buffer moved towards the batch's values by `share`, in the buffer's dtype.
Tensor new_running(const Tensor& running, const std::vector<double>& batch, double share) {
  const int64_t channels = static_cast<int64_t>(batch.size());
  std::vector<double> values = doubles(torch::stable::contiguous(running), channels, 0);
  for (int64_t c = 0; c < channels; ++c) values[c] = moved(values[c], batch[c], share);
  Tensor out = torch::stable::new_empty(running, {channels});
  if (running.scalar_type() == ScalarType::Double) {
    std::copy_n(values.data(), channels, out.mutable_data_ptr<double>());
    return out;
  }
  const std::vector<float> rounded(values.begin(), values.end());
  store(rounded.data(), out.mutable_data_ptr(), running.scalar_type(), channels);
  return out;
}

std::tuple<Tensor, Tensor> running_stats(const Tensor& stats, const Tensor& mean, const Tensor& var, Optional tracked,
                                         std::optional<double> momentum) {
  check_running("bn_running_stats", stats, mean, var, tracked, momentum);
  const int64_t channels = stats.size(0) / 2;
  const auto s = doubles(torch::stable::contiguous(stats), 2 * channels + 1, 0);
  const double given = momentum ? *momentum : 1.0 / static_cast<double>(*tracked->const_data_ptr<int64_t>());
  const double share = s[0] > 0 ? given : 0;
  std::vector<double> means(channels), vars(channels);
  for (int64_t c = 0; c < channels; ++c) {
    const Moments m = moments(s[0], s[1 + c], s[1 + channels + c]);
    means[c] = m.mean;
    vars[c] = unbiased(m);
  }
  return {new_running(mean, means, share), new_running(var, vars, share)};
}

template <typename E>
void normalize_into(const Walk& walk, const Constants<E>& constants, const E* x, const E* residual, E* y) {
  const Layout& layout = walk.layout();
  const auto block = [&](int64_t at, int64_t n, auto&& loop) {
    alignas(64) Scratch<E> scratch[3];
    L<E>* out = place(y + at, scratch[2]);
    loop(read(x + at, scratch[0], n), residual == nullptr ? nullptr : read(residual + at, scratch[1], n), out, n);
    write(out, y + at, n);
  };
  if (layout.channels_last) {
    const RowPieces pieces(layout);
    parallel(pieces.count, kPiece, [&](int64_t i) {
      for_row_blocks<E>(pieces.size(i), pieces.width, [&](int64_t offset, int64_t column, int64_t n) {
        block(pieces.begin(i) + offset, n, [&](auto... a) { row_normalize(constants.rows(column), a...); });
      });
    });
    return;
  }
  const PlanePieces pieces(layout);
  parallel(pieces.count, pieces.length, [&](int64_t i) {
    const Plane<T<E>> plane = constants.plane(pieces.plane(i) % layout.channels);
    for_blocks<E>(pieces.size(i), [&](int64_t offset, int64_t n) {
      block(pieces.begin(i) + offset, n, [&](auto... a) { plane_normalize(plane, a...); });
    });
  });
}

int64_t repeat_of(const Layout& layout) { return layout.channels_last ? RowPieces(layout).repeat : 1; }

Tensor normalize(const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight, Optional bias,
                 Optional residual, bool relu) {
  const char* op = "bn_normalize";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  if (residual) check_like(op, "residual", *residual, x);
  if (x.numel() == 0) return torch::stable::empty_like(x);
  const Walk walk(x);
  Tensor y = walk.output();
  if (residual) residual = walk.alike(*residual);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const Constants<E> constants(parameters, x.size(1), repeat_of(walk.layout()), relu);
    normalize_into<E>(walk, constants, static_cast<const E*>(walk.x().const_data_ptr()),
                      residual ? static_cast<const E*>(residual->const_data_ptr()) : nullptr,
                      static_cast<E*>(y.mutable_data_ptr()));
  });
  return walk.finish(y);
}

template <typename E>
void gradient_sums_into(const Walk& walk, const Constants<E>& constants, const E* grad, const E* x, double* out) {
  const Layout& layout = walk.layout();
  const int64_t channels = layout.channels;
  if (layout.channels_last) {
    const RowPieces pieces(layout);
    std::vector<double> partial(2 * channels * pieces.count, 0.0);
    parallel(pieces.count, kPiece, [&](int64_t i) {
      alignas(64) Scratch<E> scratch[2];
      sum_rows<E>(pieces, i, partial.data() + 2 * channels * i,
                  [&](int64_t at, int64_t column, int64_t n, T<E>* total, T<E>* product) {
                    row_gradient_sums(constants.rows(column), read(grad + at, scratch[0], n),
                                      read(x + at, scratch[1], n), total, product, n);
                  });
    });
    add_rows(pieces.count, partial, channels, out);
    return;
  }
  const PlanePieces pieces(layout);
  std::vector<double> partial(2 * pieces.count, 0.0);
  parallel(pieces.count, pieces.length, [&](int64_t i) {
    alignas(64) Scratch<E> scratch[2];
    const Plane<T<E>> plane = constants.plane(pieces.plane(i) % channels);
    for_blocks<E>(pieces.size(i), [&](int64_t offset, int64_t n) {
      const int64_t at = pieces.begin(i) + offset;
      plane_gradient_sums(plane, read(grad + at, scratch[0], n), read(x + at, scratch[1], n), n, &partial[2 * i]);
    });
  });
  add_planes(pieces, partial, channels, out);
}

Tensor backward_reduce(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight,
                       Optional bias, bool relu) {
  const char* op = "bn_backward_reduce";
  const Parameters parameters(op, x, mean, invstd, weight, bias);
  check_like(op, "grad_output", grad, x);
  const int64_t channels = x.size(1);
  Tensor sums = torch::stable::new_zeros(x, {2 * channels}, ScalarType::Double);
  if (x.numel() == 0) return sums;
  const Walk walk(x);
  const Tensor g = walk.alike(grad);
  double* out = sums.mutable_data_ptr<double>();
  const double* means = parameters.mean.const_data_ptr<double>();
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const Constants<E> constants(parameters, channels, repeat_of(walk.layout()), relu);
    gradient_sums_into<E>(walk, constants, static_cast<const E*>(g.const_data_ptr()),
                          static_cast<const E*>(walk.x().const_data_ptr()), out);
    for (int64_t c = 0; c < channels; ++c)  // the loops subtracted the rounded mean
      out[channels + c] -= (means[c] - static_cast<double>(constants.center[c])) * out[c];
  });
  return sums;
}

template <typename E>
void gradient_into(const Walk& walk, const Constants<E>& constants, const E* grad, const E* x, E* dx) {
  const Layout& layout = walk.layout();
  const auto block = [&](int64_t at, int64_t n, auto&& loop) {
    alignas(64) Scratch<E> scratch[3];
    L<E>* out = place(dx + at, scratch[2]);
    loop(read(grad + at, scratch[0], n), read(x + at, scratch[1], n), out, n);
    write(out, dx + at, n);
  };
  if (layout.channels_last) {
    const RowPieces pieces(layout);
    parallel(pieces.count, kPiece, [&](int64_t i) {
      for_row_blocks<E>(pieces.size(i), pieces.width, [&](int64_t offset, int64_t column, int64_t n) {
        block(pieces.begin(i) + offset, n, [&](auto... a) { row_gradient(constants.rows(column), a...); });
      });
    });
    return;
  }
  const PlanePieces pieces(layout);
  parallel(pieces.count, pieces.length, [&](int64_t i) {
    const Plane<T<E>> plane = constants.plane(pieces.plane(i) % layout.channels);
    for_blocks<E>(pieces.size(i), [&](int64_t offset, int64_t n) {
      block(pieces.begin(i) + offset, n, [&](auto... a) { plane_gradient(plane, a...); });
    });
  });
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
  const Tensor g = walk.alike(grad);
  Tensor dx = walk.output();
  const auto all = doubles(torch::stable::contiguous(sums), 2 * x.size(1), 0);
  dispatch_float_or_double(x.scalar_type(), op, "x", [&](auto element) {
    using E = decltype(element);
    const Constants<E> constants(parameters, x.size(1), repeat_of(walk.layout()), relu, all.data(),
                                 *count.const_data_ptr<double>());
    gradient_into<E>(walk, constants, static_cast<const E*>(g.const_data_ptr()),
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
