// How torch reaches devices, streams and events, and its hooks for pinned memory.
#include "guard.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>

#include "memory.h"

namespace pretend {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevices> streams_now{};
std::atomic<bool> available{true};

DeviceIndex checked(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "pretend:", int(index), " does not exist: there are ", kDevices, " devices");
  return index;
}

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? device_now : checked(index); }

Queue& queue_of(const Stream& stream) { return find(stream.device_index(), stream.id()); }

Point& point_of(void* event) { return *static_cast<Point*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  Device getDevice() const override { return Device(c10::kPrivateUse1, device_now); }
  void setDevice(Device device) const override { device_now = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = device.index(); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }  // also when unavailable: autograd asks but once

  Stream make(DeviceIndex index, int64_t id) const { return Stream(Stream::UNSAFE, Device(c10::kPrivateUse1, index), id); }
  Stream getDefaultStream(Device device) const override { return make(or_current(device.index()), 0); }
  Stream getStream(Device device) const override {
    auto index = or_current(device.index());
    return make(index, streams_now[index]);
  }
  Stream getNewStream(Device device, int) const override {
    auto index = or_current(device.index());
    return make(index, next_id(index));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    streams_now[checked(stream.device_index())] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return finished(mark(queue_of(stream))); }
  void synchronizeStream(const Stream& stream) const override { finish(mark(queue_of(stream))); }
  void synchronizeDevice(DeviceIndex index) const override { finish_device(or_current(index)); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    record_stream(pointer, queue_of(stream));
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Point;
    point_of(*event) = mark(queue_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) wait(queue_of(stream), point_of(event));
  }
  bool queryEvent(void* event) const override { return !event || finished(point_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) finish(point_of(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return available ? kDevices : 0; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex index) const override { device_now = checked(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(device_now, checked(index)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

int current_device() { return device_now; }
Queue& current_queue(int device) { return find(device, streams_now[device]); }

}  // namespace pretend

// Whether torch.accelerator finds the devices. Off, they are as those of a CUDA build without a GPU.
extern "C" void pretend_available(int on) {
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new pretend::Hooks);
  pretend::available = on;
}

extern "C" int pretend_device_count() { return pretend::available ? pretend::kDevices : 0; }
