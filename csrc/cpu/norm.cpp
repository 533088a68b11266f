// Layer norm and RMS norm over the rows of a CPU tensor; formulas in csrc/norm.h, arguments in csrc/norm_ops.h. Rows are
// shared among torch's threads; the parameters' gradients are summed over a partition of the rows that depends on their
// number only, then over the partitions, so the result is the same for any number of threads.
#include "../norm_ops.h"

#include <cmath>
#include <limits>
#include <memory>

#include "norm_rows.h"
#include "vector.h"

namespace apexfx {
namespace norm {
namespace {

template <typename T>
constexpr ScalarType kAccumulate = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;

// Uninitialized memory whose rows start on a cache line, so that no vector straddles two.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t n) : memory_(new char[n * sizeof(T) + 64]) {}
  T* data() const {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) & ~uintptr_t{63});
  }

 private:
  std::unique_ptr<char[]> memory_;
};

// Scratch that the calling thread keeps, up to kKept bytes of it: taken from the heap and given back at every call, it
// would be what takes the top of the heap over glibc's trim threshold, and all of that back to the system.
template <typename T>
class KeptScratch {
 public:
  explicit KeptScratch(int64_t n) {
    thread_local Scratch<T> kept;
    thread_local int64_t kept_size = 0;
    if (n * static_cast<int64_t>(sizeof(T)) > kKept) {
      own_ = Scratch<T>(n);
    } else if (n > kept_size) {
      kept = Scratch<T>(n);
      kept_size = n;
    }
    data_ = n > kept_size ? own_.data() : kept.data();
  }
  T* data() const { return data_; }

 private:
  static constexpr int64_t kKept = int64_t{4} << 20;
  Scratch<T> own_;
  T* data_;
};

// The length of a scratch row: whole cache lines.
int64_t padded(int64_t n) { return (n + 15) & ~int64_t{15}; }

// Values of any dtype as T, in place where they have it already (float64 never mixes, so double needs no conversion).
const float* values(const void* data, ScalarType dtype, float* scratch, int64_t n) {
  return load(data, dtype, scratch, n);
}
const double* values(const void* data, ScalarType, double*, int64_t) { return static_cast<const double*>(data); }

void write(const float* in, void* out, ScalarType dtype, int64_t n) { store(in, out, dtype, n); }
void write(const double* in, void* out, ScalarType, int64_t n) {
  if (in != out) std::copy(in, in + n, static_cast<double*>(out));
}

// Computes a row of n elements of `dtype`: at once where it is T, else block by block in scratch, which is narrowed while
// the cache holds it. compute(begin, count, values) makes the elements from `begin`.
template <typename T, typename F>
void make_row(void* out, ScalarType dtype, int64_t n, F&& compute) {
  if (dtype == kAccumulate<T>) return compute(int64_t{0}, n, static_cast<T*>(out));
  alignas(64) T scratch[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    compute(begin, count, scratch);
    write(scratch, element(out, dtype, begin), dtype, count);
  }
}

// A parameter as T; `absent` (one for a weight, zero for a bias) where there is none.
template <typename T>
struct Parameter {
  Scratch<T> scratch;
  Tensor held;
  const T* data;
  Parameter(const Optional& parameter, T absent, int64_t n) {
    if (parameter.has_value()) held = dense(*parameter);
    if (!parameter.has_value() || held.scalar_type() != kAccumulate<T>) scratch = Scratch<T>(n);
    data = scratch.data();
    if (parameter.has_value()) data = values(held.const_data_ptr(), held.scalar_type(), scratch.data(), n);
    else std::fill(scratch.data(), scratch.data() + n, absent);
  }
};

int64_t grain(int64_t columns) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns)); }

template <typename T>
void forward_rows(const Tensor& x, const Forward& out, const Optional& weight, const Optional& bias, Rows rows, T eps,
                  bool centered) {
  const int64_t n = rows.columns;
  const Parameter<T> w(weight, T(1), n), b(bias, T(0), n);
  const ScalarType x_dtype = x.scalar_type(), y_dtype = out.y.scalar_type();
  const void* x_data = x.const_data_ptr();
  void* y_data = out.y.mutable_data_ptr();
  T* mean_data = centered ? static_cast<T*>(out.mean.mutable_data_ptr()) : nullptr;
  T* rstd_data = static_cast<T*>(out.rstd.mutable_data_ptr());
  const auto moments = [&](int64_t row, const auto* in) {
    const T mean = centered ? static_cast<T>(sum(in, n) / n) : T(0);
    const T rstd = static_cast<T>(1 / std::sqrt(sum_of_squares(in, mean, n) / n + eps));
    if (centered) mean_data[row] = mean;
    rstd_data[row] = rstd;
    return std::pair(mean, rstd);
  };
  torch::stable::parallel_for(0, rows.count, grain(n), [&](int64_t begin, int64_t end) {
    if constexpr (sizeof(T) == 4)
      if (x_dtype == ScalarType::BFloat16 && y_dtype == ScalarType::BFloat16) {
        for (int64_t row = begin; row < end; ++row) {
          const BFloat16* in = static_cast<const BFloat16*>(x_data) + row * n;
          const auto [mean, rstd] = moments(row, in);
          normalize(in, mean, rstd, w.data, b.data, static_cast<BFloat16*>(y_data) + row * n, n);
        }
        return;
      }
    const Scratch<T> scratch(x_dtype == kAccumulate<T> ? 0 : n);
    for (int64_t row = begin; row < end; ++row) {
      const T* in = values(element(x_data, x_dtype, row * n), x_dtype, scratch.data(), n);
      const auto [mean, rstd] = moments(row, in);
      make_row<T>(element(y_data, y_dtype, row * n), y_dtype, n,
                  [&, mean = mean, rstd = rstd](int64_t from, int64_t count, T* y) {
        normalize(in + from, mean, rstd, w.data + from, b.data + from, y, count);
      });
    }
  });
}

// The partial sums of the parameters' gradients: one pair of rows for each part of the rows. Enough parts for many
// threads, few enough that the sums are small beside what is read, short enough that a part's sum is exact enough.
struct Partition {
  int64_t rows_per_part, parts;
  Partition(int64_t rows, int64_t columns)
      : rows_per_part(std::max({int64_t{16}, (rows + 63) / 64, std::min<int64_t>(128, (1 << 17) / columns)})),
        parts((rows + rows_per_part - 1) / rows_per_part) {}
};

template <typename T>
void sum_parts(const T* partial, int64_t first, int64_t parts, int64_t n, const Tensor& out) {
  const ScalarType dtype = out.scalar_type();
  void* data = out.mutable_data_ptr();
  torch::stable::parallel_for(0, (n + kBlock - 1) / kBlock, std::max<int64_t>(1, 64 / std::max<int64_t>(1, parts)),
                              [&](int64_t begin, int64_t end) {
    T total[kBlock];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t column = block * kBlock, count = std::min(kBlock, n - column);
      std::fill(total, total + count, T(0));
      for (int64_t part = 0; part < parts; ++part) add(partial + (2 * part + first) * padded(n) + column, total, count);
      write(total, element(data, dtype, column), dtype, count);
    }
  });
}

// Rows [begin, end): dx, and where `partial` is given the sums for the parameters (dweight, then dbias).
template <typename T>
struct BackwardRows {
  const Backward& a;
  Tensor grad, saved;
  const Tensor& dx;
  int64_t n;
  bool centered;
  Parameter<T> weight, bias;

  void operator()(int64_t begin, int64_t end, T* partial) const {
    if constexpr (sizeof(T) == 4)
      if (grad.scalar_type() == ScalarType::BFloat16 && saved.scalar_type() == ScalarType::BFloat16 &&
          a.input_dtype == ScalarType::BFloat16 && !a.from_output)
        return in_place<BFloat16>(begin, end, partial);
    converted(begin, end, partial);
  }

  // The means of g and of g * h over a row.
  template <typename E>
  std::pair<T, T> means(const RowGradient<E, T>& inputs) const {
    double sums[2];
    gradient_sums(inputs, sums);
    return {centered ? static_cast<T>(sums[0] / n) : T(0), static_cast<T>(sums[1] / n)};
  }

  // `count` elements of a row from `begin`.
  template <typename E>
  void gradients(RowGradient<E, T> inputs, int64_t begin, int64_t count, std::pair<T, T> of, T rstd, E* out,
                 T* partial) const {
    inputs.grad += begin;
    inputs.x += begin;
    inputs.weight += begin;
    inputs.n = count;
    if (partial) gradients_row(inputs, of.first, of.second, rstd, out, partial + begin, partial + padded(n) + begin);
    else input_gradient_row(inputs, of.first, of.second, rstd, out);
  }

  // No conversion: the loops widen and round E themselves.
  template <typename E>
  void in_place(int64_t begin, int64_t end, T* partial) const {
    const E *g = static_cast<const E*>(grad.const_data_ptr()), *x = static_cast<const E*>(saved.const_data_ptr());
    const T *mean = mean_data(), *rstd = rstd_data();
    E* out = static_cast<E*>(dx.mutable_data_ptr());
    for (int64_t r = begin; r < end; ++r) {
      const RowGradient<E, T> inputs{g + r * n, x + r * n, weight.data, mean ? mean[r] : T(0), rstd[r], n};
      gradients(inputs, 0, n, means(inputs), rstd[r], out + r * n, partial);
    }
  }

  void converted(int64_t begin, int64_t end, T* partial) const {
    const ScalarType g_dtype = grad.scalar_type(), s_dtype = saved.scalar_type(), dx_dtype = a.input_dtype;
    const void *g_data = grad.const_data_ptr(), *s_data = saved.const_data_ptr();
    void* dx_data = dx.mutable_data_ptr();
    const T *mean = mean_data(), *rstd = rstd_data();
    const int64_t length = padded(n);
    const Scratch<T> scratch(3 * length);
    T *g_scratch = scratch.data(), *s_scratch = g_scratch + length, *h_scratch = s_scratch + length;
    for (int64_t r = begin; r < end; ++r) {
      const T* g = values(element(g_data, g_dtype, r * n), g_dtype, g_scratch, n);
      const T* x = values(element(s_data, s_dtype, r * n), s_dtype, s_scratch, n);
      RowGradient<T, T> inputs{g, x, weight.data, mean ? mean[r] : T(0), rstd[r], n};
      if (a.from_output) {
        recover(x, weight.data, bias.data, static_cast<T>(a.eps), h_scratch, n);
        inputs.x = h_scratch;
        inputs.scale = T(1);
      }
      const auto of = means(inputs);
      make_row<T>(element(dx_data, dx_dtype, r * n), dx_dtype, n, [&](int64_t from, int64_t count, T* out) {
        gradients(inputs, from, count, of, rstd[r], out, partial);
      });
    }
  }

  const T* mean_data() const {
    return centered && !a.from_output ? static_cast<const T*>(a.mean->const_data_ptr()) : nullptr;
  }
  const T* rstd_data() const { return static_cast<const T*>(a.rstd.const_data_ptr()); }
};

template <typename T>
void backward_rows(const Backward& a, Rows rows, const Gradients& out, bool centered, bool parameters) {
  const int64_t n = rows.columns;
  const BackwardRows<T> run{a, dense(a.grad), dense(a.saved), out.dx, n, centered,
                            Parameter<T>(a.weight, T(1), n), Parameter<T>(a.bias, T(0), n)};
  if (!parameters) {
    torch::stable::parallel_for(0, rows.count, grain(n), [&](int64_t begin, int64_t end) { run(begin, end, nullptr); });
    return;
  }
  const Partition partition(rows.count, n);
  const int64_t pair = 2 * padded(n);
  const KeptScratch<T> partial(pair * partition.parts);
  torch::stable::parallel_for(0, partition.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * partition.rows_per_part;
      T* sums = partial.data() + part * pair;
      std::fill(sums, sums + pair, T(0));
      run(first, std::min(rows.count, first + partition.rows_per_part), sums);
    }
  });
  if (a.weight.has_value()) sum_parts(partial.data(), 0, partition.parts, n, out.dweight);
  if (a.bias.has_value()) sum_parts(partial.data(), 1, partition.parts, n, out.dbias);
}

struct Cpu {
  static Forward forward(const char* op, const Tensor& x, const Optional& weight, const Optional& bias,
                         int64_t num_dims, double eps, std::optional<ScalarType> dtype, bool centered) {
    const Rows rows = check_forward(op, x, weight, bias, num_dims, eps, dtype);
    const ScalarType accumulate = accumulate_dtype(x.scalar_type());
    const auto leading = sizes_of(x, x.dim() - num_dims);
    Forward out;
    out.y = torch::stable::new_empty(x, sizes_of(x, x.dim()), dtype.value_or(x.scalar_type()));
    if (centered) out.mean = torch::stable::new_empty(x, leading, accumulate);
    out.rstd = torch::stable::new_empty(x, leading, accumulate);
    if (rows.columns == 0) {  // the mean of nothing, as torch
      if (centered) torch::stable::fill_(out.mean, std::numeric_limits<double>::quiet_NaN());
      torch::stable::fill_(out.rstd, std::numeric_limits<double>::quiet_NaN());
    } else if (accumulate == ScalarType::Double) {
      forward_rows<double>(dense(x), out, weight, bias, rows, eps, centered);
    } else {
      forward_rows<float>(dense(x), out, weight, bias, rows, static_cast<float>(eps), centered);
    }
    return out;
  }

  static Gradients backward(Backward a, bool centered, bool parameters) {
    const Rows rows = check_backward(a, centered);
    a.rstd = dense(a.rstd);
    if (a.mean.has_value()) a.mean = dense(*a.mean);
    Gradients out;
    out.dx = torch::stable::new_empty(a.saved, sizes_of(a.saved, a.saved.dim()), a.input_dtype);
    if (parameters) {
      out.dweight = parameter_gradient(a.weight, a.rstd);
      out.dbias = parameter_gradient(a.bias, a.rstd);
    }
    if (rows.columns == 0) return out;
    const bool wide = accumulate_dtype(a.saved.scalar_type()) == ScalarType::Double;
    (wide ? backward_rows<double> : backward_rows<float>)(a, rows, out, centered, parameters);
    return out;
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) { APEXFX_REGISTER_NORMS(m, Cpu); }

}  // namespace norm
}  // namespace apexfx
