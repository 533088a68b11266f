// Layer norm and RMS norm of float16 inputs.
#include "norm_narrow.cuh"

namespace apexfx {
namespace norm {

template <>
void forward_of<Half>(const ForwardTensors& t) {
  narrow_forward<Half>(t);
}
template <>
void backward_of<Half>(const BackwardTensors& t) {
  narrow_backward<Half>(t);
}

}  // namespace norm
}  // namespace apexfx
