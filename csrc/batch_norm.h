// Batch norm: the arithmetic that CPU and CUDA share, the argument checks, and the layouts of x in memory.
//
//   y  = (x - mean) * invstd * weight + bias                                      [+ residual] [ReLU]
//   dx = (g - sum g / n - (x - mean) * invstd^2 * sum g(x - mean) / n) * invstd * weight
//
// Both are one multiplication and one addition an element once the vectors of C are folded into a few constants. The
// mean is float64; its float32 rounding is subtracted from x (nearly exact where x is near it), and what the rounding
// left over goes into the constant.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <limits>

#include "common.h"

namespace apexfx {
namespace batch_norm {

// 1 / n for a count n >= 1. A division of doubles is a function call on CUDA, with spilled registers around it; two
// Newton steps from a single precision guess are as good.
APEXFX_HD double reciprocal(double n) {
#ifdef __CUDA_ARCH__
  double r = static_cast<double>(__frcp_rn(static_cast<float>(n)));
  r += r * fma(-n, r, 1.0);
  return r + r * fma(-n, r, 1.0);
#else
  return 1 / n;
#endif
}

// y = (x - center) * scale + shift
template <typename T>
struct Affine {
  T center, scale, shift;
  template <typename X>  // T, or a vector of it
  APEXFX_HD X operator()(const X& x) const {
    return (x - center) * scale + shift;
  }
};

template <typename T>
APEXFX_HD Affine<T> affine(double mean, double invstd, double weight, double bias) {
  const T center = static_cast<T>(mean);
  const double scale = invstd * weight;
  return {center, static_cast<T>(scale), static_cast<T>(bias - (mean - static_cast<double>(center)) * scale)};
}

// dx = g * per_grad + (x - center) * per_x + constant
template <typename T>
struct InputGradient {
  T per_grad, per_x, constant;
  template <typename X>
  APEXFX_HD X operator()(const X& grad, const X& centered) const {
    return grad * per_grad + (centered * per_x + constant);
  }
};

// sum_grad and sum_centered are sums over all ranks, of g and of g * (x - mean).
template <typename T>
APEXFX_HD InputGradient<T> input_gradient(double mean, double invstd, double weight, double sum_grad,
                                          double sum_centered, double count) {
  const double scale = invstd * weight, share = reciprocal(count < 1 ? 1 : count);
  const double per_x = -scale * invstd * invstd * (sum_centered * share);
  const double left_over = mean - static_cast<double>(static_cast<T>(mean));
  const double constant = -scale * (sum_grad * share) - left_over * per_x;
  return {static_cast<T>(scale), static_cast<T>(per_x), static_cast<T>(constant)};
}

template <typename T>
APEXFX_HD T relu(T y) {
  return y < T(0) ? T(0) : y;  // NaN stays
}

// The largest value that rounds to 0 in E: the mask of a ReLU is that of its rounded output.
template <typename E>
APEXFX_HD Compute<E> largest_zero() {
  return 0;
}
template <>
APEXFX_HD float largest_zero<Half>() {
  return 0x1p-25f;
}

// sum x = n k + S and sum x^2 = Q + 2 k S + n k^2, from the sums S and Q of x - k and its square.
struct Sums {
  double total, of_squares;
};

APEXFX_HD Sums unshifted(double count, double shift, double total, double of_squares) {
  return {total + count * shift, of_squares + shift * (2 * total + count * shift)};
}

// Whether n values are far from the shift for how much they vary (a first element that is an outlier): the sums are
// then taken again around the mean, because sums of single precision squares have lost what tells the values apart.
APEXFX_HD bool is_far(double count, double total, double of_squares) {
  return total * total > of_squares * (count * (15.0 / 16));  // of_squares - total^2 / count < of_squares / 16
}

struct Moments {
  double count, mean, var;
};

APEXFX_HD Moments moments(double count, double total, double of_squares) {
  const double n = count < 1 ? 1 : count, share = reciprocal(n), mean = total * share;
  const double var = of_squares * share - mean * mean;
  return {n, mean, var < 0 ? 0 : var};
}

APEXFX_HD double unbiased(const Moments& m) {
  return m.var * (m.count * reciprocal(m.count - 1 < 1 ? 1 : m.count - 1));
}

APEXFX_HD double moved(double old, double batch, double share) { return old + share * (batch - old); }

// ---- host: checks ---------------------------------------------------------------------------------------------------

// Spelled out only where a message is written.
struct Shape {
  const Tensor& of;
};

inline std::string text(const Shape& shape) {
  const auto sizes = shape.of.sizes();
  std::string out = "(";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  return out + (sizes.size() == 1 ? ",)" : ")");
}

// A schema lets None through where it asks for a tensor.
inline void check_defined(const char* op, const char* name, const Tensor& t) {
  check(t.defined(), op, name, " is None; expected a tensor");
}

inline void check_input(const char* op, const Tensor& x) {
  check_defined(op, "x", x);
  check(is_floating(x.scalar_type()), op, "x is ", dtype_name(x.scalar_type()),
        "; expected float64, float32, float16 or bfloat16");
  check(x.dim() >= 2, op, "x has shape ", Shape{x}, "; expected (N, C) or (N, C, ...)");
}

inline void check_vector(const char* op, const char* name, const Tensor& v, int64_t length, const Tensor& like,
                         bool float64 = false) {
  check_defined(op, name, v);
  check(float64 ? v.scalar_type() == ScalarType::Double : is_floating(v.scalar_type()), op, name, " is ",
        dtype_name(v.scalar_type()), "; expected ", float64 ? "float64" : "a floating dtype");
  check(v.dim() == 1 && v.size(0) == length, op, name, " has shape ", Shape{v}, "; expected (", length, ",)");
  check(same_device(v, like), op, name, " is on another device than the first argument");
}

inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  check_defined(op, name, t);
  check(t.scalar_type() == x.scalar_type(), op, name, " is ", dtype_name(t.scalar_type()), "; expected ",
        dtype_name(x.scalar_type()), ", the dtype of x");
  check(same_sizes(t, x), op, name, " has shape ", Shape{t}, "; expected ", Shape{x}, ", the shape of x");
  check(same_device(t, x), op, name, " is on another device than x");
}

inline void check_stats(const char* op, const Tensor& stats) {
  check_defined(op, "stats", stats);
  check(stats.scalar_type() == ScalarType::Double && stats.dim() == 1 && stats.size(0) % 2 == 1, op, "stats is ",
        dtype_name(stats.scalar_type()), " of ", Shape{stats}, "; expected float64 of (2C + 1,)");
}

// x, and the vectors of C that go with it.
inline void check_affine(const char* op, const Tensor& x, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias) {
  check_input(op, x);
  if (weight) check_vector(op, "weight", *weight, x.size(1), x);
  if (bias) check_vector(op, "bias", *bias, x.size(1), x);
}

inline void check_running_buffers(const char* op, const Tensor& like, int64_t channels, const Tensor& mean,
                                  const Tensor& var, const std::optional<Tensor>& tracked,
                                  const std::optional<double>& momentum) {
  check_vector(op, "running_mean", mean, channels, like);
  check_vector(op, "running_var", var, channels, like);
  check(!tracked.has_value() || same_device(*tracked, like), op,
        "num_batches_tracked is on another device than the first argument");
  if (momentum.has_value()) return;
  check(tracked.has_value() && tracked->numel() == 1 && tracked->scalar_type() == ScalarType::Long, op,
        "num_batches_tracked is needed as int64 of one element, because momentum is None (a cumulative average)");
}

inline void check_running(const char* op, const Tensor& stats, const Tensor& mean, const Tensor& var,
                          const std::optional<Tensor>& tracked, const std::optional<double>& momentum) {
  check_stats(op, stats);
  check_running_buffers(op, stats, stats.size(0) / 2, mean, var, tracked, momentum);
}

// Contiguous; the dispatcher, which costs as much as the kernels of a small batch norm, is asked only where it is needed.
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline std::optional<Tensor> dense(const std::optional<Tensor>& t) { return t ? std::optional(dense(*t)) : t; }

// The vectors of C that describe a normalization.
struct Parameters {
  Tensor mean, invstd;
  std::optional<Tensor> weight, bias;

  Parameters(const char* op, const Tensor& x, const Tensor& mean_, const Tensor& invstd_,
             const std::optional<Tensor>& weight_, const std::optional<Tensor>& bias_)
      : mean(mean_), invstd(invstd_), weight(weight_), bias(bias_) {
    check_affine(op, x, weight, bias);
    check_vector(op, "mean", mean, x.size(1), x, true);
    check_vector(op, "invstd", invstd, x.size(1), x, true);
    mean = dense(mean);
    invstd = dense(invstd);
    weight = dense(weight);
    bias = dense(bias);
  }
};

// ---- host: memory layout --------------------------------------------------------------------------------------------

// Either N * C planes of `inner` elements, or (channels_last) `outer` rows of C elements.
struct Layout {
  bool channels_last;
  int64_t outer, channels, inner;
  int64_t per_channel() const { return outer * inner; }
  int64_t numel() const { return outer * channels * inner; }
};

inline bool is_channels_last(const Tensor& x) {
  int64_t expected = x.size(1);
  if (x.size(1) > 1 && x.stride(1) != 1) return false;
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    if (d == 1) continue;
    if (x.size(d) > 1 && x.stride(d) != expected) return false;
    expected *= x.size(d);
  }
  return true;
}

// x in one of the two layouts (a contiguous copy where it is in neither), and the other operands laid out alike.
class DenseInput {
 public:
  explicit DenseInput(const Tensor& x) : original_(x), x_(x) {
    int64_t inner = 1;
    for (int64_t d = 2; d < x.dim(); ++d) inner *= x.size(d);
    if (x.dim() > 2 && inner > 1 && x.is_contiguous()) {
      layout_ = {false, x.size(0), x.size(1), inner};
    } else if (is_channels_last(x)) {
      layout_ = {true, x.size(0) * inner, x.size(1), 1};
    } else {
      x_ = torch::stable::contiguous(x);
      layout_ = inner > 1 ? Layout{false, x.size(0), x.size(1), inner} : Layout{true, x.size(0), x.size(1), 1};
    }
  }

  const Layout& layout() const { return layout_; }
  const Tensor& x() const { return x_; }

  Tensor alike(const Tensor& t) const {
    if (same_strides(t, x_)) return t;
    Tensor copy = output();
    return torch::stable::copy_(copy, t);
  }

  // The memory to write a result into, and that result as the caller gets it: with the strides of empty_like(x).
  Tensor output() const {
    int32_t dtype, device, index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x_.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x_.get(), &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x_.get(), &index));
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(x_.dim(), x_.sizes().data(), x_.strides().data(), dtype, device,
                                                    index, &handle));
    return Tensor(handle);
  }
  Tensor finish(const Tensor& result) const {
    if (same_strides(original_, x_)) return result;
    Tensor y = torch::stable::empty_like(original_);
    return same_strides(y, result) ? result : torch::stable::copy_(y, result);
  }

 private:
  Tensor original_, x_;
  Layout layout_;
};

}  // namespace batch_norm
}  // namespace apexfx
