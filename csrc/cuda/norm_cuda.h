// The launches of layer norm and RMS norm as host functions, by the dtype of x (csrc/cuda/norm_*.cu, instantiated apart so
// that they compile side by side).
#pragma once

#include "../norm_ops.h"
#include "common.cuh"

namespace apexfx {
namespace norm {

struct ForwardTensors {
  Tensor x, y, mean, rstd;  // mean is undefined for RMS norm
  Optional weight, bias;
  Rows rows;
  double eps;
  bool centered;
};

struct BackwardTensors {
  Backward inputs;  // contiguous
  Tensor dx, dweight, dbias;
  Rows rows;
  bool centered, parameters;
};

template <typename X>
void forward_of(const ForwardTensors& t);
template <typename X>
void backward_of(const BackwardTensors& t);

}  // namespace norm
}  // namespace apexfx
