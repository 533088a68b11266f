// The passes over x as host functions (csrc/cuda/batch_norm.cu): what the ops that run several of them call.
#pragma once

#include "batch_norm_device.cuh"

namespace apexfx {
namespace batch_norm {

using Optional = std::optional<Tensor>;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

Tensor local_stats(const Tensor& x);
Tensor normalize(const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight, Optional bias,
                 Optional residual, bool relu);
Tensor backward_reduce(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd, Optional weight,
                       Optional bias, bool relu);
Tensor backward_elementwise(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                            const Tensor& sums, const Tensor& count, Optional weight, Optional bias, bool relu);

}  // namespace batch_norm
}  // namespace apexfx
