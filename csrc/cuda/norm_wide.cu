// Layer norm and RMS norm of float32 and float64 tensors: every tensor of one dtype.
#include "norm_launch.cuh"

namespace apexfx {
namespace norm {

template <>
void forward_of<float>(const ForwardTensors& t) {
  launch_forward<float, float, float>(t);
}
template <>
void forward_of<double>(const ForwardTensors& t) {
  launch_forward<double, double, double>(t);
}
template <>
void backward_of<float>(const BackwardTensors& t) {
  launch_backward<float, float, float, float>(t);
}
template <>
void backward_of<double>(const BackwardTensors& t) {
  launch_backward<double, double, double, double>(t);
}

}  // namespace norm
}  // namespace apexfx
