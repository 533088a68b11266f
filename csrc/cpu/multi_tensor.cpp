// multi_tensor_scale, multi_tensor_axpby and multi_tensor_l2norm on the CPU; see csrc/multi_tensor_ops.h.
#include "../multi_tensor_ops.h"

#include <atomic>
#include <cmath>

#include "sums.h"
#include "multi_tensor_loop.h"

namespace apexfx {
namespace {

#define APEXFX_MULTI_TENSOR_LOOPS(T)                                                       \
  APEXFX_CLONES void scale_loop(const T* x, T* out, T scale, int64_t n) {                  \
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;                                 \
  }                                                                                        \
  APEXFX_CLONES void axpby_loop(const T* x, const T* y, T* out, T a, T b, int64_t n) {     \
    for (int64_t i = 0; i < n; ++i) out[i] = a * x[i] + b * y[i];                          \
  }

APEXFX_MULTI_TENSOR_LOOPS(float)
APEXFX_MULTI_TENSOR_LOOPS(double)

struct Cpu {
  static void scale(TensorLists& lists, double scale, const float* factor, float* flag) {
    if (factor != nullptr) scale *= *factor;
    std::atomic<bool> non_finite{false};
    const MultiTensorLoop loop(lists);
    loop.run<2>(0b10, 0b10, [&](const Chunk&, auto** x, int64_t n) {
      using T = std::decay_t<decltype(x[0][0])>;
      if (any_non_finite(x[0], n)) non_finite = true;
      scale_loop(x[0], x[1], static_cast<T>(scale), n);
    });
    lists.finish();
    if (non_finite) *flag = 1.0f;
  }

  static void axpby(TensorLists& lists, double a, double b, int arg_to_check, float* flag) {
    std::atomic<bool> non_finite{false};
    const MultiTensorLoop loop(lists);
    loop.run<3>(0b100, 0b100, [&](const Chunk&, auto** x, int64_t n) {
      using T = std::decay_t<decltype(x[0][0])>;
      if ((arg_to_check != 1 && any_non_finite(x[0], n)) || (arg_to_check != 0 && any_non_finite(x[1], n)))
        non_finite = true;
      axpby_loop(x[0], x[1], x[2], static_cast<T>(a), static_cast<T>(b), n);
    });
    lists.finish();
    if (non_finite) *flag = 1.0f;
  }

  static void l2norm(TensorLists& lists, const float* factor, const Tensor& norm, const Tensor* norms,
                     const Tensor& found_inf) {
    const MultiTensorLoop loop(lists);
    PartialSums sums(loop);
    // Square sums are kept in double, which no finite float overflows: a non-finite sum means a non-finite element.
    loop.run<1>(0, 0, [&](const Chunk& chunk, auto** x, int64_t n) { sums.add(chunk, square_sum(x[0], n)); });
    const double multiplier = factor != nullptr ? std::fabs(static_cast<double>(*factor)) : 1.0;
    const std::vector<double> totals = sums.per_tensor();
    double total = 0.0;
    for (size_t t = 0; t < totals.size(); ++t) {
      total += totals[t];
      if (norms != nullptr)
        static_cast<float*>(norms->data_ptr())[t] = static_cast<float>(std::sqrt(totals[t]) * multiplier);
    }
    *static_cast<float*>(norm.data_ptr()) = static_cast<float>(std::sqrt(total) * multiplier);
    *static_cast<float*>(found_inf.data_ptr()) = std::isfinite(total) ? 0.0f : 1.0f;
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) { APEXFX_REGISTER_MULTI_TENSOR(m, Cpu); }

}  // namespace apexfx
