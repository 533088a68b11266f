// torch's header without a device to guard: the emulation has one stream, and its calls do not fail.
#pragma once

#define DeviceGuard TorchDeviceGuard
#include_next <torch/csrc/stable/accelerator.h>
#undef DeviceGuard

#undef STD_CUDA_CHECK
#undef STD_CUDA_KERNEL_LAUNCH_CHECK
#define STD_CUDA_CHECK(call) (call)
#define STD_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)

namespace torch::stable::accelerator {

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};

}  // namespace torch::stable::accelerator

inline AOTITorchError aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
