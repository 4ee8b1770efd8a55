// What torch asks of a device before it dispatches to it. A build of torch without CUDA has none for `cuda`.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct SimulatedGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
    c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard);
