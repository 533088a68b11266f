// What the batch norm ops on CPU share: scratch for what the loops cannot read in memory, threads, and the constants of
// the channels. Work is cut into pieces by the sizes alone, so results do not depend on the number of threads.
#pragma once

#include "batch_norm_loops.h"
#include "vector.h"

namespace apexfx {
namespace batch_norm {

using Optional = std::optional<Tensor>;
using Doubles = std::vector<double>;

constexpr int64_t kPiece = 64 * 1024;  // elements per task

template <typename E>
using T = Compute<E>;
template <typename E>
constexpr bool kDirect = !std::is_same_v<E, Half>;  // the loops read and write it in memory

// What the loops are given: float16 goes through float scratch, bfloat16 is bits.
template <typename E>
using L = std::conditional_t<std::is_same_v<E, Half>, float, std::conditional_t<std::is_same_v<E, BFloat16>, Bf16, E>>;
template <typename E>
using Scratch = L<E>[kDirect<E> ? 1 : kBlock];

// n elements of `data` for a loop: in place, or converted into `scratch`; null stays null.
template <typename E>
const L<E>* read(const E* data, L<E>* scratch, int64_t n) {
  if constexpr (kDirect<E>) return reinterpret_cast<const L<E>*>(data);
  if (data == nullptr) return nullptr;
  if constexpr (!kDirect<E>) widen(data, scratch, n);
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

template <typename P>
P* offset(P* pointer, int64_t by) {
  return pointer == nullptr ? nullptr : pointer + by;
}

// Calls loop(first, second, out) with up to n elements of `a`, of `b` (which may be null) and for `out`.
template <typename E, typename F>
void with_scratch(const E* a, const E* b, E* out, int64_t n, F&& loop) {
  alignas(64) Scratch<E> scratch[3];
  L<E>* into = place(out, scratch[2]);
  loop(read(a, scratch[0], n), read(b, scratch[1], n), into);
  write(into, out, n);
}

template <typename F>
void parallel(int64_t tasks, int64_t elements_per_task, F&& f) {
  const int64_t grain = std::max<int64_t>(1, kPiece / 2 / std::max<int64_t>(1, elements_per_task));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// A vector on the CPU, not by way of the dispatcher, which costs as much as the loops of a small batch norm.
inline Tensor new_vector(int64_t length, ScalarType dtype) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  const int32_t type = dtype == ScalarType::Double ? aoti_torch_dtype_float64()
                       : dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Half ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &length, &stride, type, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}
inline Tensor new_zeros(int64_t length) {
  Tensor out = new_vector(length, ScalarType::Double);
  std::fill_n(out.mutable_data_ptr<double>(), length, 0.0);
  return out;
}

inline Doubles doubles(const Optional& vector, int64_t length, double otherwise) {
  if (!vector) return Doubles(length, otherwise);
  if (vector->scalar_type() == ScalarType::Double) {
    const double* data = vector->const_data_ptr<double>();
    return Doubles(data, data + length);
  }
  std::vector<float> scratch(vector->scalar_type() == ScalarType::Float ? 0 : length);
  const float* data = load(vector->const_data_ptr(), vector->scalar_type(), scratch.data(), length);
  return Doubles(data, data + length);
}

// The constants of every channel, `repeat` times over.
template <typename E>
class ChannelConstants {
 public:
  ChannelConstants(const Optional& weight, const Optional& bias, int64_t channels, int64_t repeat, bool relu,
                   bool with_gradient = false)
      : weight_(doubles(weight, channels, 1)), bias_(doubles(bias, channels, 0)), channels_(channels), relu_(relu) {
    for (auto* v : {&center_, &scale_, &shift_}) v->resize(channels * repeat);
    if (with_gradient)
      for (auto* v : {&per_grad_, &per_x_, &constant_}) v->resize(channels * repeat);
  }

  // The constants of a normalization by given statistics, and (with `sums`) of its gradient.
  ChannelConstants(const Parameters& p, int64_t repeat, bool relu, const double* sums = nullptr, double count = 1)
      : ChannelConstants(p.weight, p.bias, p.mean.size(0), repeat, relu, sums != nullptr) {
    const double *mean = p.mean.const_data_ptr<double>(), *invstd = p.invstd.const_data_ptr<double>();
    set(mean, invstd, 0, channels_);
    if (sums != nullptr) set_gradient(mean, invstd, sums, sums + channels_, count, 0, channels_);
    tile();
  }

  // Fill in the channels [first, first + n); every vector begins with the first of them.
  void set(const double* mean, const double* invstd, int64_t first, int64_t n) {
    channel_affine(mean, invstd, &weight_[first], &bias_[first], &center_[first], &scale_[first], &shift_[first], n);
  }
  void set_gradient(const double* mean, const double* invstd, const double* sum_grad, const double* sum_centered,
                    double count, int64_t first, int64_t n) {
    channel_input_gradient(mean, invstd, &weight_[first], sum_grad, sum_centered, count, &per_grad_[first],
                           &per_x_[first], &constant_[first], n);
  }
  // Repeats what is filled in.
  void tile() {
    for (auto* v : {&center_, &scale_, &shift_, &per_grad_, &per_x_, &constant_})
      for (int64_t i = channels_; i < static_cast<int64_t>(v->size()); ++i) (*v)[i] = (*v)[i - channels_];
  }

  // sum g * (x - mean) from sum g * (x - center), since the loops subtract the rounded mean.
  void recenter(const double* mean, const double* sum_grad, double* sum_centered, int64_t first, int64_t n) const {
    for (int64_t c = 0; c < n; ++c)
      sum_centered[c] -= (mean[c] - static_cast<double>(center_[first + c])) * sum_grad[c];
  }

  Constants<T<E>> from(int64_t channel) const {
    const bool all = !constant_.empty();
    const Constants<T<E>> begin{center_.data(), scale_.data(), shift_.data(), all ? per_grad_.data() : nullptr,
                                all ? per_x_.data() : nullptr, all ? constant_.data() : nullptr, relu_,
                                largest_zero<E>()};
    return begin.from(channel);
  }

 private:
  Doubles weight_, bias_;
  std::vector<T<E>> center_, scale_, shift_, per_grad_, per_x_, constant_;
  int64_t channels_;
  bool relu_;
};

// The running buffers moved towards the batch's values, into `new_mean` and `new_var`, contiguous vectors that hold the
// old values and may be the buffers themselves.
void move_running(const double* stats, int64_t channels, const Optional& tracked, std::optional<double> momentum,
                  Tensor& new_mean, Tensor& new_var);

}  // namespace batch_norm
}  // namespace apexfx
