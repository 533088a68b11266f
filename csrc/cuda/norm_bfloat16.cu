// Layer norm and RMS norm of bfloat16 inputs.
#include "norm_narrow.cuh"

namespace apexfx {
namespace norm {

template <>
void forward_of<BFloat16>(const ForwardTensors& t) {
  narrow_forward<BFloat16>(t);
}
template <>
void backward_of<BFloat16>(const BackwardTensors& t) {
  narrow_backward<BFloat16>(t);
}

}  // namespace norm
}  // namespace apexfx
