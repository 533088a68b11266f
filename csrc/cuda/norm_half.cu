// Layer norm and RMS norm of float16 inputs.
#include "norm_launch.cuh"

namespace apexfx {
namespace norm {

APEXFX_INSTANTIATE_NORMS(Half);

}  // namespace norm
}  // namespace apexfx
