// A CUDA device that does nothing, for a torch that was built without CUDA, or with it on a machine
// without a GPU: there torch has both of what follows, and ours comes first.
//
// Fake tensors need no kernels, but torch's core asks two tables about a device: which device and
// stream are current (the guard, also asked by autograd's thread for the device), and whether
// there is CUDA at all (the hooks). Here both say: one device, one stream, nothing to wait for.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device only_device(c10::DeviceType::CUDA, 0);
const c10::Stream only_stream(c10::Stream::DEFAULT, only_device);

using Base = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;

// torch's own no-op guard has devices without a number: autograd needs one.
struct AbsentDevice final : Base {
  c10::Device getDevice() const override { return only_device; }
  c10::Device exchangeDevice(c10::Device) const override { return only_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct AbsentHooks final : at::CUDAHooksInterface {
  explicit AbsentHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, AbsentHooks)
}  // namespace at

// After torch is imported, which brings its own.
extern "C" void use_absent_device() {
  static const AbsentDevice device;
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &device);
}
