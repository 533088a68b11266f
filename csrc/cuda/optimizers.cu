// adam_, lamb_, sgd_, adagrad_ and novograd_ on CUDA. Formulas: csrc/optimizer_math.h; arguments: csrc/optimizer_ops.h.
// Operands: param, grad, state..., model copy last (written as the parameter is, in its own dtype).
#include "../optimizer_ops.h"

#include "multi_tensor_loop.cuh"

namespace apexfx {
namespace {

// Param, grad, state and model copy: all in one dtype, or float32 masters of 16-bit gradients and models, or 16-bit
// parameters with float32 state; the rest is looked at.
template <typename>
struct InDouble {
  using type = double;
};
template <typename... State>
using OptimizerDtypes =
    Variants<Operands<float, float, State..., void>, Operands<float, Half, State..., Half>,
             Operands<float, BFloat16, State..., BFloat16>, Operands<Half, Half, State..., void>,
             Operands<BFloat16, BFloat16, State..., void>, Operands<Any<float>, Any<float>, State..., Any<float>>,
             Operands<double, double, typename InDouble<State>::type..., Any<double>>>;

// Adam: x = param, grad, exp_avg, exp_avg_sq, model
struct Adam {
  static constexpr int kOperands = 5, kSums = 0;
  static constexpr unsigned kWritten = 0b11101, kUnread = 0b10000;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = true;
  using Dtypes = OptimizerDtypes<float, float>;
  AdamOptions options;
  DeviceScalars scalars;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ AdamScalars<T> prepare() const { return adam_scalars<T>(options, scalars); }
  template <typename T>
  __device__ void apply(T (&x)[5], const AdamScalars<T>& s, double (&)[1]) const {
    adam_update(x[0], x[2], x[3], x[1], s);
    x[4] = x[0];
  }
};

// LAMB, first pass: moments, and the square sums of p and of its direction.
struct LambMoments {
  static constexpr int kOperands = 5, kSums = 2;
  static constexpr unsigned kWritten = 0b01100, kUnread = 0b10000;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = true;
  using Dtypes = OptimizerDtypes<float, float>;
  AdamOptions options;
  DeviceScalars scalars;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ AdamScalars<T> prepare() const { return adam_scalars<T>(options, scalars); }
  template <typename T>
  __device__ void apply(T (&x)[5], const AdamScalars<T>& s, double (&sums)[3]) const {
    adam_moments(x[0], x[2], x[3], x[1], s);
    const double p = static_cast<double>(x[0]), u = static_cast<double>(adam_direction(x[0], x[2], x[3], s));
    sums[0] += p * p;
    sums[1] += u * u;
  }
};

template <typename T>
struct LambScalars {
  AdamScalars<T> adam;
  T rate;
};

// LAMB, second pass: the direction again, and the descent at the tensor's own rate.
struct LambDescent {
  static constexpr int kOperands = 5, kSums = 0;
  static constexpr unsigned kWritten = 0b10001, kUnread = 0b10010;
  static constexpr bool kMaximum = false, kPerTensor = true, kUnscales = false;
  using Dtypes = OptimizerDtypes<float, float>;
  AdamOptions options;
  DeviceScalars scalars;
  const double* totals;
  bool adapts;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ LambScalars<T> prepare() const { return {adam_scalars<T>(options, scalars), T(0)}; }
  template <typename T>
  __device__ void for_tensor(LambScalars<T>& s, const Table<5>& table, int t) const {
    const double* total = totals + 2 * static_cast<int64_t>(table.index[t]);
    s.rate = lamb_rate(s.adam.lr, total[0], total[1], adapts);
  }
  template <typename T>
  __device__ void apply(T (&x)[5], const LambScalars<T>& s, double (&)[1]) const {
    x[0] = x[0] - s.rate * adam_direction(x[0], x[2], x[3], s.adam);
    x[4] = x[0];
  }
};

// SGD: x = param, grad, momentum buffer, model. kMomentum: 0 none, 1 the first run, 2 any later one.
template <int kMomentum>
struct Sgd {
  static constexpr int kOperands = 4, kSums = 0;
  static constexpr unsigned kWritten = kMomentum ? 0b1101 : 0b1001;
  static constexpr unsigned kUnread = kMomentum == 2 ? 0b1000 : 0b1100;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = true;
  using Dtypes = OptimizerDtypes<std::conditional_t<kMomentum == 0, void, float>>;
  SgdOptions options;
  DeviceScalars scalars;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ SgdScalars<T> prepare() const { return sgd_scalars<T>(options, scalars); }
  template <typename T>
  __device__ void apply(T (&x)[4], const SgdScalars<T>& s, double (&)[1]) const {
    if constexpr (kMomentum == 0) sgd_update(x[0], x[1], s);
    else sgd_momentum_update<T, kMomentum == 1>(x[0], x[2], x[1], s);
    x[3] = x[0];
  }
};

// Adagrad: x = param, grad, sum, model
struct Adagrad {
  static constexpr int kOperands = 4, kSums = 0;
  static constexpr unsigned kWritten = 0b1101, kUnread = 0b1000;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = true;
  using Dtypes = OptimizerDtypes<float>;
  AdagradOptions options;
  DeviceScalars scalars;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ AdagradScalars<T> prepare() const { return adagrad_scalars<T>(options, scalars); }
  template <typename T>
  __device__ void apply(T (&x)[4], const AdagradScalars<T>& s, double (&)[1]) const {
    adagrad_update(x[0], x[2], x[1], s);
    x[3] = x[0];
  }
};

// NovoGrad: x = param, grad, exp_avg, model, and (not by element) the tensor's norm.
template <bool kMax>
struct NovogradNorm {
  static constexpr int kOperands = 4, kSums = 1;
  static constexpr unsigned kWritten = 0, kUnread = 0b1101;
  static constexpr bool kMaximum = kMax, kPerTensor = false, kUnscales = false;
  using Dtypes = Variants<Operands<void, float, void, void>, Operands<void, Half, void, void>,
                          Operands<void, BFloat16, void, void>, Operands<void, double, void, void>>;
  DeviceScalars scalars;
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ int prepare() const { return 0; }
  template <typename T>
  __device__ void apply(T (&x)[4], int, double (&sums)[2]) const {
    const double g = static_cast<double>(x[1]);
    sums[0] = kMax ? CombineMax{}(sums[0], fabs(g)) : sums[0] + g * g;
  }
};

struct Novograd {
  static constexpr int kOperands = 4, kSums = 0;
  static constexpr unsigned kWritten = 0b1101, kUnread = 0b1000;
  static constexpr bool kMaximum = false, kPerTensor = true, kUnscales = true;
  using Dtypes = OptimizerDtypes<float>;
  NovogradOptions options;
  DeviceScalars scalars;
  const float* norms;  // of this step, in the caller's order
  __device__ bool skip() const { return scalars.skip(); }
  template <typename T>
  __device__ NovogradScalars<T> prepare() const { return novograd_scalars<T>(options, scalars); }
  template <typename T>
  __device__ void for_tensor(NovogradScalars<T>& s, const Table<4>& table, int t) const {
    set_norm(s, static_cast<double>(norms[table.index[t]]), options);
  }
  template <typename T>
  __device__ void apply(T (&x)[4], const NovogradScalars<T>& s, double (&)[1]) const {
    novograd_update(x[0], x[2], x[1], s);
    x[3] = x[0];
  }
};

// The tensors' own norms, a batch of pointers at a time.
struct NormPointers {
  static constexpr int kCapacity = 256;
  float* norm[kCapacity];
};

// n of every tensor from the gradient's total; written to the state and to `current`.
__global__ void novograd_norm_kernel(const __grid_constant__ NormPointers pointers, int first, int count, const double* totals,
                                     NovogradOptions options, DeviceScalars scalars, float* current) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count || scalars.skip()) return;
  const double norm = options.max_norm ? totals[first + t] : sqrt(totals[first + t]);
  const float n = static_cast<float>(novograd_norm(*pointers.norm[t], norm, options, scalars));
  *pointers.norm[t] = n;
  current[first + t] = n;
}

// Runs after every kernel that read the count.
__global__ void count_step_kernel(float* step, DeviceScalars scalars) {
  if (!scalars.skip()) *step += 1.0f;
}

void count_step(const DeviceScalars& scalars, cudaStream_t stream) {
  count_step_kernel<<<1, 1, 0, stream>>>(const_cast<float*>(scalars.step), scalars);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

struct Cuda {
  static void adam(TensorLists& lists, const AdamOptions& options, const DeviceScalars& scalars) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    const cudaStream_t stream = current_stream(first);
    run(lists, Adam{options, scalars}, stream);
    count_step(scalars, stream);
  }

  static void sgd(TensorLists& lists, const SgdOptions& options, const DeviceScalars& scalars) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    const cudaStream_t stream = current_stream(first);
    if (options.momentum == 0.0) run(lists, Sgd<0>{options, scalars}, stream);
    else if (options.first_run) run(lists, Sgd<1>{options, scalars}, stream);
    else run(lists, Sgd<2>{options, scalars}, stream);
  }

  static void adagrad(TensorLists& lists, const AdagradOptions& options, const DeviceScalars& scalars) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    run(lists, Adagrad{options, scalars}, current_stream(first));
  }

  static void lamb(TensorLists& lists, const AdamOptions& options, bool adapts, const DeviceScalars& scalars) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    const cudaStream_t stream = current_stream(first);
    int64_t num_chunks = 0;
    const auto tables = tables_of<5>(lists.positions(), num_chunks);
    const Tensor partials = scratch_doubles(first, 2 * num_chunks), totals = scratch_doubles(first, 2 * lists.size());
    double* partial_data = static_cast<double*>(partials.data_ptr());
    double* total_data = static_cast<double*>(totals.data_ptr());
    multi_tensor_loop(tables, LambMoments{options, scalars}, partial_data, stream);
    combine<2, false>(tables, partial_data, total_data, scalars.found_inf, stream);
    multi_tensor_loop(tables, LambDescent{options, scalars, total_data, adapts}, nullptr, stream);
    lists.finish();
    count_step(scalars, stream);
  }

  static void novograd(TensorLists& lists, const std::vector<float*>& norms, const NovogradOptions& options,
                       const DeviceScalars& scalars) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    const cudaStream_t stream = current_stream(first);
    int64_t num_chunks = 0;
    const auto tables = tables_of<4>(lists.positions(), num_chunks);
    const int64_t count = static_cast<int64_t>(lists.size());
    const Tensor partials = scratch_doubles(first, num_chunks), totals = scratch_doubles(first, count);
    const Tensor current = torch::stable::new_empty(first, {count}, ScalarType::Float);
    double* partial_data = static_cast<double*>(partials.data_ptr());
    double* total_data = static_cast<double*>(totals.data_ptr());
    float* current_data = static_cast<float*>(current.data_ptr());
    if (options.max_norm) {
      multi_tensor_loop(tables, NovogradNorm<true>{scalars}, partial_data, stream);
      combine<1, true>(tables, partial_data, total_data, scalars.found_inf, stream);
    } else {
      multi_tensor_loop(tables, NovogradNorm<false>{scalars}, partial_data, stream);
      combine<1, false>(tables, partial_data, total_data, scalars.found_inf, stream);
    }
    for (int64_t begin = 0; begin < count; begin += NormPointers::kCapacity) {
      NormPointers pointers{};
      const int batch = static_cast<int>(std::min<int64_t>(NormPointers::kCapacity, count - begin));
      std::copy_n(norms.begin() + begin, batch, pointers.norm);
      novograd_norm_kernel<<<(batch + 63) / 64, 64, 0, stream>>>(pointers, static_cast<int>(begin), batch, total_data,
                                                                 options, scalars, current_data);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    multi_tensor_loop(tables, Novograd{options, scalars, current_data}, nullptr, stream);
    lists.finish();
    count_step(scalars, stream);
  }

 private:
  template <typename Op>
  static void run(TensorLists& lists, const Op& op, cudaStream_t stream) {
    int64_t num_chunks = 0;
    multi_tensor_loop(tables_of<Op::kOperands>(lists.positions(), num_chunks), op, nullptr, stream);
    lists.finish();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) { APEXFX_REGISTER_OPTIMIZERS(m, Cuda); }

}  // namespace apexfx
