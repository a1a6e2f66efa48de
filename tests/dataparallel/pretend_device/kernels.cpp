// The operators: memory and views by hand, all others on the host once the current stream is empty.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "copies.h"
#include "guard.h"
#include "memory.h"

namespace pretend {
namespace {

using at::IntArrayRef, at::Tensor;
using Use = std::pair<Tensor, bool>;  // a tensor, and whether it is written

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : at::Device(at::kPrivateUse1, current_device());
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_memory(), kKeys, c10::dtype_or_default(dtype));
}

// A piece of work that uses the tensors, on the current stream of their one device.
Point start_kernel(const std::string& name, const std::vector<Use>& uses) {
  auto first = std::find_if(uses.begin(), uses.end(), [](auto& use) { return use.first.is_privateuseone(); });
  auto device = first == uses.end() ? at::Device(at::kPrivateUse1, current_device()) : first->first.device();
  bool indexes = name.find("index") != std::string::npos;  // whose indices may be on the host, as CUDA's
  for (auto& [x, _] : uses)
    TORCH_CHECK(x.device() == device || (x.is_cpu() && (x.dim() == 0 || indexes)),
                "Expected all tensors to be on the same device, but ", name, " got ", device, " and ", x.device());
  auto& queue = current_queue(device.index());
  for (auto& [x, writes] : uses)
    if (auto block = block_of(x.storage().data_ptr())) check_use(*block, queue, writes, name);
  auto point = run_now(queue);
  for (auto& [x, writes] : uses)
    if (auto block = block_of(x.storage().data_ptr())) note_use(*block, point, writes);
  count(KERNELS);
  return point;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  std::vector<Use> uses;
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    auto add = [&](const c10::IValue& value) {
      if (value.isTensor() && value.toTensor().defined()) uses.emplace_back(value.toTensor(), alias && alias->isWrite());
    };
    if (arguments[i].isList())
      for (const c10::IValue& value : arguments[i].toListRef()) add(value);
    else add(arguments[i]);
  }
  auto point = start_kernel(schema.name(), uses);
  {
    Inside inside;
    at::native::cpu_fallback(op, stack);
  }
  bool host = std::any_of(schema.returns().begin(), schema.returns().end(), [](auto& r) {
    return r.type()->kind() == c10::TypeKind::NumberType || r.type()->kind() == c10::TypeKind::BoolType;
  });
  if (host) finish(point);  // the host needs the value
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  std::vector<Use> uses{{x, false}, {weight, false}};
  if (bias && bias->defined()) uses.emplace_back(*bias, false);
  start_kernel("aten::convolution", uses);
  Inside inside;
  auto host_bias = uses.size() == 3 ? std::optional(bias->cpu()) : std::nullopt;
  auto y = at::convolution(x.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return y.to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
    bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  start_kernel("aten::convolution_backward", {{grad, false}, {x, false}, {weight, false}});
  Inside inside;
  auto bias_size = std::vector<int64_t>{grad.size(1)};
  auto [dx, dw, db] = at::convolution_backward(grad.cpu(), x.cpu(), weight.cpu(), bias_size, stride, padding, dilation,
                                               transposed, output_padding, groups, mask);
  auto back = [&](const Tensor& y) { return y.defined() ? y.to(x.device()) : y; };
  return {back(dx), back(dw), back(db)};
}

// The schema of the operator hides that it writes the running statistics, so that the fallback would lose them.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
    const std::optional<Tensor>& var, bool training, double momentum, double eps) {
  if (!mean || !mean->defined()) return at::_native_batch_norm_legit(x, weight, bias, training, momentum, eps);
  Tensor running_mean = *mean, running_var = *var;
  return at::_native_batch_norm_legit(x, weight, bias, running_mean, running_var, training, momentum, eps);
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  copy(self, from, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  copy(to, self, non_blocking);
  return to;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  start_kernel("aten::resize_", {{self, true}});
  return at::native::resize_(self, size, format);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

void record_stream_op(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), find(stream.device_index(), stream.id()));
}

int64_t attention_by_parts(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  c10::SetAllocator(c10::kPrivateUse1, device_memory());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream_op);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_fused_sdp_choice", attention_by_parts);
}

}  // namespace pretend
