// Layer norm and RMS norm of a 16-bit input: parameters in its dtype or float32, output in its dtype or the parameters'.
#pragma once

#include "norm_launch.cuh"

namespace apexfx {
namespace norm {

template <typename X>
void narrow_forward(const ForwardTensors& t) {
  const std::optional<Tensor>& parameter = t.weight.has_value() ? t.weight : t.bias;
  const bool wide_parameters = !parameter.has_value() || parameter->scalar_type() == ScalarType::Float;
  if (!wide_parameters) launch_forward<X, X, X>(t);
  else if (t.y.scalar_type() == ScalarType::Float) launch_forward<X, float, float>(t);
  else launch_forward<X, float, X>(t);
}

// grad and saved are both X, both float32 (from a float32 output), or grad alone is float32.
template <typename X>
void narrow_backward(const BackwardTensors& t) {
  const std::optional<Tensor>& parameter = t.inputs.weight.has_value() ? t.inputs.weight : t.inputs.bias;
  const bool wide_parameters = !parameter.has_value() || parameter->scalar_type() == ScalarType::Float;
  if (!wide_parameters) launch_backward<X, X, X, X>(t);
  else if (t.inputs.saved.scalar_type() == ScalarType::Float) launch_backward<float, float, X, float>(t);
  else if (t.inputs.grad.scalar_type() == ScalarType::Float) launch_backward<float, X, X, float>(t);
  else launch_backward<X, X, X, float>(t);
}

}  // namespace norm
}  // namespace apexfx
