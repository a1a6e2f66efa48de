#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include "guard.h"
#include "memory.h"

namespace pretend {
namespace {

thread_local int depth = 0;

// The same memory as a CPU tensor, which does not own it.
at::Tensor host_view(const at::Tensor& x) {
  auto view = at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), x.options().device(at::kCPU));
  view._set_conj(x.is_conj());
  view._set_neg(x.is_neg());
  return view;
}

Counter direction(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu()) return D2H;
  if (from.is_cpu()) return H2D;
  return to.device() == from.device() ? LOCAL : D2D;
}

}  // namespace

Inside::Inside() { ++depth; }
Inside::~Inside() { --depth; }

void copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView plain;
  auto target = host_view(to), source = host_view(from.expand_as(to));
  if (depth) {
    target.copy_(source);
    return;
  }
  auto way = direction(to, from);
  // between devices the copy is the source's work, and the destination waits for it
  auto& queue = current_queue((way == H2D ? to : from).get_device());
  auto from_block = block_of(from.storage().data_ptr()), to_block = block_of(to.storage().data_ptr());
  if (way == D2D) wait(queue, mark(current_queue(to.get_device())));
  if (from_block) check_use(*from_block, queue, false, "copy");
  if (to_block) check_use(*to_block, queue, true, "copy");
  auto kept = way == H2D ? from_block : way == D2H ? to_block : nullptr;  // only pinned memory outlives its tensor
  auto point = push(queue, [target, source, kept] {
    at::AutoDispatchBelowADInplaceOrView plain;
    const_cast<at::Tensor&>(target).copy_(source);
  });
  if (from_block) note_use(*from_block, point, false);
  if (to_block) note_use(*to_block, point, true);
  if (way == D2D) wait(current_queue(to.get_device()), point);
  count(way), count(Counter(way + H2D_BYTES), to.nbytes());
  if ((way == H2D || way == D2H) && !(non_blocking && kept)) finish(point);
}

}  // namespace pretend
