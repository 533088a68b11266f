// The four passes over x that batch norm is made of: how they are shared among threads, and the constants of the channels.
// Work is cut by the sizes alone, so results do not depend on the number of threads.
#pragma once

#include "batch_norm_loops.h"
#include "vector.h"

namespace apexfx {
namespace batch_norm {

using Optional = std::optional<Tensor>;
using Doubles = std::vector<double>;

constexpr int64_t kTask = 64 * 1024;  // elements

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

template <typename F>
void parallel(int64_t tasks, int64_t elements_per_task, F&& f) {
  const int64_t grain = std::max<int64_t>(1, kTask / 2 / std::max<int64_t>(1, elements_per_task));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

inline Doubles doubles(const Optional& vector, int64_t length, double otherwise) {
  if (!vector) return Doubles(length, otherwise);
  if (vector->scalar_type() == ScalarType::Double) {
    const double* data = vector->const_data_ptr<double>();
    return Doubles(data, data + length);
  }
  std::vector<float> scratch(length);
  const float* data = load(vector->const_data_ptr(), vector->scalar_type(), scratch.data(), length);
  return Doubles(data, data + length);
}

// Rows of few channels are taken several at a time, so that a loop over the columns fills registers.
inline int64_t repeat_of(const Layout& x) { return x.channels_last ? std::max<int64_t>(1, 64 / x.channels) : 1; }

// The constants of every channel, repeat_of(layout) times over.
template <typename E>
class ChannelConstants {
  using T = Compute<E>;

 public:
  ChannelConstants(const Layout& layout, const Optional& weight, const Optional& bias, bool relu)
      : weight_(doubles(weight, layout.channels, 1)), bias_(doubles(bias, layout.channels, 0)),
        channels_(layout.channels), width_(channels_ * repeat_of(layout)), relu_(relu), values_(6 * width_) {}

  // Fill in the channels [first, first + n); every vector begins with the first of them.
  void set(const double* mean, const double* invstd, int64_t first, int64_t n) {
    T *center = &values_[first], *scale = center + width_, *shift = scale + width_;
    for (int64_t c = 0; c < n; ++c) {
      const Affine<T> a = affine<T>(mean[c], invstd[c], weight_[first + c], bias_[first + c]);
      center[c] = a.center, scale[c] = a.scale, shift[c] = a.shift;
    }
  }
  void set_gradient(const double* mean, const double* invstd, const double* sum_grad, const double* sum_centered,
                    double count, int64_t first, int64_t n) {
    T *per_grad = &values_[3 * width_ + first], *per_x = per_grad + width_, *constant = per_x + width_;
    for (int64_t c = 0; c < n; ++c) {
      const auto g = input_gradient<T>(mean[c], invstd[c], weight_[first + c], sum_grad[c], sum_centered[c], count);
      per_grad[c] = g.per_grad, per_x[c] = g.per_x, constant[c] = g.constant;
    }
  }
  // Repeats what is filled in.
  void tile() {
    for (int64_t vector = 0; vector < 6 * width_; vector += width_)
      for (int64_t i = vector + channels_; i < vector + width_; ++i) values_[i] = values_[i - channels_];
  }

  // sum g * (x - mean) from sum g * (x - center), since the loops subtract the rounded mean.
  void recenter(const double* mean, const double* sum_grad, double* sum_centered, int64_t first, int64_t n) const {
    for (int64_t c = 0; c < n; ++c)
      sum_centered[c] -= (mean[c] - static_cast<double>(values_[first + c])) * sum_grad[c];
  }

  Constants<T> from(int64_t channel) const {
    const T *affine = &values_[channel], *gradient = affine + 3 * width_;
    return {affine, affine + width_, affine + 2 * width_, gradient, gradient + width_, gradient + 2 * width_, relu_,
            largest_zero<E>()};
  }

 private:
  Doubles weight_, bias_;
  int64_t channels_, width_;
  bool relu_;
  std::vector<T> values_;
};

// x cut into segments, each of some whole planes, a part of one, or some rows of channels_last x, and those into blocks of
// neighbouring channels: all of them where they are the columns.
class Passes {
 public:
  explicit Passes(const Layout& x) : x_(x), repeat_(repeat_of(x)) {
    parts_ = divide_up(x.inner, kTask);
    part_ = divide_up(x.inner, parts_);
    // Segments of rows are few and long, since each has a sum for every channel.
    const int64_t least = x.channels_last ? std::max<int64_t>(128, divide_up(x.outer, 256)) : 1;
    const int64_t most = std::max(kTask / (x.channels_last ? x.channels : x.inner), least);
    segments_ = parts_ > 1 ? x.outer * parts_ : divide_up(x.outer, most);
    if (x.channels_last && segments_ > 1) segments_ = divide_up(segments_, 2) * 2;  // as many for each thread
    planes_ = parts_ > 1 ? 1 : divide_up(divide_up(x.outer, segments_), repeat_) * repeat_;
    if (parts_ == 1) segments_ = divide_up(x.outer, planes_);
  }

  int64_t segments() const { return segments_; }

  // Adds the [sum, sum of squares] of a segment of n channels from `first` to `total` and `of_squares`. The sums are those
  // of x less the channel's first element, or less a better shift where that turns out to be far from the mean.
  template <typename E>
  void sums(const E* x, int64_t segment, int64_t first, int64_t n, double* total, double* of_squares) const {
    using T = Compute<E>;
    const int64_t width = n * repeat_;
    const double count = static_cast<double>(count_of(segment));
    std::vector<T> shift(width);
    Doubles found(2 * width);
    for (int64_t c = 0; c < n; ++c) shift[c] = static_cast<T>(x[begin_of(segment, first) + c * x_.inner]);
    const auto sum = [&] {
      for (int64_t i = n; i < width; ++i) shift[i] = shift[i - n];
      std::fill(found.begin(), found.end(), 0.0);
      for_matrices(segment, first, n, [&](int64_t at, const Matrix& m) {
        add_sums(m, x + at, shift.data(), found.data(), found.data() + width);
      });
      fold(found, n);
    };
    sum();
    bool any_is_far = false;
    for (int64_t c = 0; c < n; ++c)
      if (is_far(count, found[c], found[width + c])) {
        shift[c] += static_cast<T>(found[c] / count);
        any_is_far = true;
      }
    if (any_is_far) sum();
    for (int64_t c = 0; c < n; ++c) {
      const Sums sums = unshifted(count, static_cast<double>(shift[c]), found[c], found[width + c]);
      total[c] += sums.total, of_squares[c] += sums.of_squares;
    }
  }

  // Adds [sum g, sum g * (x - center)].
  template <typename E>
  void gradient_sums(const ChannelConstants<E>& constants, const E* grad, const E* x, int64_t segment, int64_t first,
                     int64_t n, double* total, double* centered) const {
    const int64_t width = n * repeat_;
    Doubles found(2 * width, 0.0);
    for_matrices(segment, first, n, [&](int64_t at, const Matrix& m) {
      add_gradient_sums(m, constants.from(first), grad + at, x + at, found.data(), found.data() + width);
    });
    fold(found, n);
    for (int64_t c = 0; c < n; ++c) total[c] += found[c], centered[c] += found[width + c];
  }

  template <typename E>
  void normalize(const ChannelConstants<E>& constants, const E* x, const E* residual, E* y, int64_t segment,
                 int64_t first, int64_t n) const {
    for_matrices(segment, first, n, [&](int64_t at, const Matrix& m) {
      normalize_matrix(m, constants.from(first), x + at, residual == nullptr ? nullptr : residual + at, y + at);
    });
  }

  template <typename E>
  void gradient(const ChannelConstants<E>& constants, const E* grad, const E* x, E* dx, int64_t segment, int64_t first,
                int64_t n) const {
    for_matrices(segment, first, n, [&](int64_t at, const Matrix& m) {
      gradient_matrix(m, constants.from(first), grad + at, x + at, dx + at);
    });
  }

  // Runs f(segment, first channel, channels) for all of them: at least half a task's elements each, where there are enough
  // channels for some threads.
  template <typename F>
  void for_all(F&& f) const {
    const int64_t elements = std::max<int64_t>(1, x_.per_channel() / segments_), wanted = kTask / 2 / elements;
    const int64_t block = x_.channels_last ? x_.channels
                                           : std::clamp<int64_t>(wanted, 1, divide_up(x_.channels, 8));
    const int64_t blocks = divide_up(x_.channels, block);
    parallel(blocks * segments_, block * elements, [&](int64_t i) {
      const int64_t first = i % blocks * block;
      f(i / blocks, first, std::min(block, x_.channels - first));
    });
  }

  // Adds up f(segment, first, channels, total, second), the two sums of a segment, into out[c] and out[C + c].
  template <typename F>
  void sum_all(double* out, F&& f) const {
    const int64_t length = 2 * x_.channels;
    Doubles partial(length * segments_, 0.0);
    for_all([&](int64_t segment, int64_t first, int64_t n) {
      double* total = &partial[length * segment + first];
      f(segment, first, n, total, total + x_.channels);
    });
    for (int64_t segment = 0; segment < segments_; ++segment)
      for (int64_t i = 0; i < length; ++i) out[i] += partial[length * segment + i];
  }

  // How many channels to take together so that `operands` tensors of E stay in a cache from the statistics to what reads
  // them; 0 where whole channels are too large for it or apart in memory, or too few to share among the threads.
  template <typename E>
  int64_t cached_channels(int64_t operands) const {
    constexpr int64_t cache = 512 * 1024;  // bytes
    const int64_t bytes = x_.per_channel() * operands * static_cast<int64_t>(sizeof(E));
    const int64_t threads = torch::stable::get_num_threads();
    if (x_.channels_last || bytes > 2 * cache || (x_.channels < threads && segments_ > 1)) return 0;
    const int64_t most = std::max<int64_t>(1, cache / bytes), rounds = divide_up(x_.channels, most * threads);
    return divide_up(x_.channels, rounds * threads);  // as many for each thread
  }

 private:
  // The first plane (or row) of a segment, and how many it has; all but one part of a plane where planes are cut.
  int64_t first_plane(int64_t segment) const { return parts_ > 1 ? segment / parts_ : segment * planes_; }
  int64_t planes_of(int64_t segment) const { return std::min(planes_, x_.outer - first_plane(segment)); }
  int64_t inside(int64_t segment) const { return parts_ > 1 ? segment % parts_ * part_ : 0; }
  int64_t length_of(int64_t segment) const { return std::min(part_, x_.inner - inside(segment)); }
  int64_t count_of(int64_t segment) const { return planes_of(segment) * length_of(segment); }
  int64_t begin_of(int64_t segment, int64_t channel) const {
    return (first_plane(segment) * x_.channels + channel) * x_.inner + inside(segment);
  }

  // Calls f(offset, matrix) for the elements of n channels from `first`: those of a plane of each, which are neighbours in
  // memory; or all rows, repeat_ of them in each of the matrix.
  template <typename F>
  void for_matrices(int64_t segment, int64_t first, int64_t n, F&& f) const {
    const int64_t begin = begin_of(segment, first), planes = planes_of(segment);
    if (!x_.channels_last) {
      for (int64_t i = 0; i < planes; ++i) f(begin + i * x_.channels * x_.inner, Matrix{n, length_of(segment), false});
      return;
    }
    const int64_t rows = planes / repeat_, rest = planes % repeat_;
    f(begin, Matrix{rows, n * repeat_, true});
    if (rest > 0) f(begin + rows * repeat_ * n, Matrix{1, n * rest, true});
  }

  // Adds up the repeat_ sums of each of n channels.
  void fold(Doubles& sums, int64_t n) const {
    const int64_t width = n * repeat_;
    for (int64_t i = n; i < width; ++i) sums[i % n] += sums[i], sums[width + i % n] += sums[width + i];
  }

  Layout x_;
  int64_t repeat_;
  int64_t parts_, part_;  // of a plane; elements of one
  int64_t segments_;      // of a channel
  int64_t planes_;        // of a segment, or rows
};

}  // namespace batch_norm
}  // namespace apexfx
