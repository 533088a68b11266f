// multi_tensor_scale, multi_tensor_axpby and multi_tensor_l2norm on CUDA; see csrc/multi_tensor_ops.h.
#include "../multi_tensor_ops.h"

#include "multi_tensor_loop.cuh"

namespace apexfx {
namespace {

struct NoScalars {};

// x[1] = x[0] * scale * *factor
struct Scale {
  static constexpr int kOperands = 2, kSums = 0;
  static constexpr unsigned kWritten = 0b10, kUnread = 0b10;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = false;
  using Dtypes = CopyDtypes;
  double scale;
  const float* factor;
  float* flag;
  __device__ bool skip() const { return false; }
  template <typename T>
  __device__ T prepare() const {
    return static_cast<T>(factor != nullptr ? scale * *factor : scale);
  }
  template <typename T>
  __device__ void apply(T (&x)[2], T s, double (&)[1]) const {
    if (!isfinite(x[0])) *flag = 1.0f;
    x[1] = x[0] * s;
  }
};

// x[2] = a x[0] + b x[1]
struct Axpby {
  static constexpr int kOperands = 3, kSums = 0;
  static constexpr unsigned kWritten = 0b100, kUnread = 0b100;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = false;
  using Dtypes =
      Variants<Operands<float, float, float>, Operands<Half, Half, Half>, Operands<BFloat16, BFloat16, BFloat16>,
               Operands<Any<float>, Any<float>, Any<float>>, Operands<double, double, double>>;
  double a, b;
  int arg_to_check;
  float* flag;
  __device__ bool skip() const { return false; }
  template <typename T>
  __device__ NoScalars prepare() const { return {}; }
  template <typename T>
  __device__ void apply(T (&x)[3], NoScalars, double (&)[1]) const {
    if ((arg_to_check != 1 && !isfinite(x[0])) || (arg_to_check != 0 && !isfinite(x[1]))) *flag = 1.0f;
    x[2] = static_cast<T>(a) * x[0] + static_cast<T>(b) * x[1];
  }
};

// Square sums are kept in double, which no finite float overflows: a non-finite sum means a non-finite element.
struct SquareSum {
  static constexpr int kOperands = 1, kSums = 1;
  static constexpr unsigned kWritten = 0, kUnread = 0;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = false;
  using Dtypes = Variants<Operands<float>, Operands<Half>, Operands<BFloat16>, Operands<double>>;
  __device__ bool skip() const { return false; }
  template <typename T>
  __device__ NoScalars prepare() const { return {}; }
  template <typename T>
  __device__ void apply(T (&x)[1], NoScalars, double (&sums)[2]) const {
    const double value = static_cast<double>(x[0]);
    sums[0] += value * value;
  }
};

// One block: norm = sqrt(sum of partials) * |*factor|, found_inf, and where `totals` are given the norm of each tensor.
constexpr int kNormThreads = 1024;

__global__ void __launch_bounds__(kNormThreads, 1)
    norm_kernel(const double* __restrict__ partials, int64_t num_partials, const double* __restrict__ totals, int64_t count,
                const float* factor, float* norm, float* norms, float* found_inf) {
  using Reduce = cub::BlockReduce<double, kNormThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const double multiplier = factor != nullptr ? fabs(static_cast<double>(*factor)) : 1.0;
  double total = 0.0;
  for (int64_t i = threadIdx.x; i < num_partials; i += kNormThreads) total += partials[i];
  if (totals != nullptr)
    for (int64_t t = threadIdx.x; t < count; t += kNormThreads) norms[t] = static_cast<float>(sqrt(totals[t]) * multiplier);
  total = Reduce(scratch).Sum(total);
  if (threadIdx.x == 0) {
    *norm = static_cast<float>(sqrt(total) * multiplier);
    *found_inf = isfinite(total) ? 0.0f : 1.0f;
  }
}

struct Cuda {
  static void scale(TensorLists& lists, double scale, const float* factor, float* flag) {
    run(lists, Scale{scale, factor, flag});
  }

  static void axpby(TensorLists& lists, double a, double b, int arg_to_check, float* flag) {
    run(lists, Axpby{a, b, arg_to_check, flag});
  }

  static void l2norm(TensorLists& lists, const float* factor, const Tensor& norm, const Tensor* norms,
                     const Tensor& found_inf) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    const cudaStream_t stream = current_stream(first);
    int64_t num_chunks = 0;
    const auto tables = tables_of<1>(lists.positions(), num_chunks);
    const Tensor partials = scratch_doubles(first, num_chunks);
    double* partial_data = static_cast<double*>(partials.data_ptr());
    multi_tensor_loop(tables, SquareSum{}, partial_data, stream);
    const int64_t count = norms != nullptr ? static_cast<int64_t>(lists.size()) : 0;
    const Tensor totals = scratch_doubles(first, count);
    double* total_data = count > 0 ? static_cast<double*>(totals.data_ptr()) : nullptr;
    if (count > 0) combine<1, false>(tables, partial_data, total_data, nullptr, stream);
    norm_kernel<<<1, kNormThreads, 0, stream>>>(
        partial_data, num_chunks, total_data, count, factor, static_cast<float*>(norm.data_ptr()),
        count > 0 ? static_cast<float*>(norms->data_ptr()) : nullptr, static_cast<float*>(found_inf.data_ptr()));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  template <typename Op>
  static void run(TensorLists& lists, const Op& op) {
    const Tensor first = lists.first();
    const DeviceGuard guard(first.get_device_index());
    int64_t num_chunks = 0;
    multi_tensor_loop(tables_of<Op::kOperands>(lists.positions(), num_chunks), op, nullptr, current_stream(first));
    lists.finish();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) { APEXFX_REGISTER_MULTI_TENSOR(m, Cuda); }

}  // namespace apexfx
