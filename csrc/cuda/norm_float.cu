// Layer norm and RMS norm of float32 and float64 inputs.
#include "norm_launch.cuh"

namespace apexfx {
namespace norm {

APEXFX_INSTANTIATE_NORMS(float);
APEXFX_INSTANTIATE_NORMS(double);

}  // namespace norm
}  // namespace apexfx
