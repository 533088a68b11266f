// Layer norm and RMS norm of bfloat16 inputs.
#include "norm_launch.cuh"

namespace apexfx {
namespace norm {

APEXFX_INSTANTIATE_NORMS(BFloat16);

}  // namespace norm
}  // namespace apexfx
