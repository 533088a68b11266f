// torch's header without a device to guard: the emulation has one stream.
#pragma once

#define DeviceGuard TorchDeviceGuard
#include_next <torch/csrc/stable/accelerator.h>
#undef DeviceGuard

namespace torch::stable::accelerator {

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};

}  // namespace torch::stable::accelerator

inline AOTITorchError aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
