// Copies between host and devices, queued on streams as CUDA's are.
#pragma once
#include <ATen/core/Tensor.h>

namespace pretend {

// While one lives on this thread, copies are plain and at once: those of a kernel that runs on the host.
struct Inside {
  Inside();
  ~Inside();
};

void copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking);

}  // namespace pretend
