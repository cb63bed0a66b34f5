// A device guard for CUDA that does nothing, so that ops on fakes of that device run in a build of torch without CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

}  // namespace
