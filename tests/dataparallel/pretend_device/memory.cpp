#include "memory.h"

#include <array>
#include <cstring>

#include "guard.h"

namespace pretend {
namespace {

using Holder = std::shared_ptr<Block>;
using Lock = std::unique_lock<std::mutex>;

struct Memory {
  std::mutex mutex;
  std::map<size_t, std::vector<void*>> free;  // never returned: a late copy may still write there
  std::map<const char*, size_t> pinned;
  std::vector<std::string> races;
  std::array<int64_t, kCounters> counters{};
};

Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

Holder take(size_t bytes, Queue* home) {
  bytes = (bytes + 511) / 512 * 512;
  void* data = nullptr;
  {
    Lock lock(memory().mutex);
    auto& spare = memory().free[bytes];
    if (!spare.empty()) data = spare.back(), spare.pop_back();
    if (!home) ++memory().counters[PINNED];
  }
  if (!data) data = std::aligned_alloc(512, bytes);
  std::memset(data, 0xFF, bytes);
  return Holder(new Block{data, bytes, home});
}

void release_device(void* context) {
  std::unique_ptr<Holder> holder(static_cast<Holder*>(context));
  auto block = std::move(*holder);
  count(LIVE, -int64_t(block->bytes));
  std::vector<Point> unsafe;
  {
    Lock lock(memory().mutex);
    auto uses = block->read;
    if (block->written.queue) uses[block->written.queue] = block->written;
    for (auto& [queue, point] : uses)
      if (!block->recorded.count(queue) && !ordered(*block->home, point)) {
        unsafe.push_back(point);
        memory().races.push_back("memory of " + name(*block->home) + " is freed while " + name(*queue) +
                                 " may use it: record_stream is missing");
      }
  }
  for (auto* queue : block->recorded) push_or_run(*queue, [block] {});
  auto* home = block->home;
  auto freed = push_or_run(*home, [block = std::move(block)]() mutable { block.reset(); });
  if (!unsafe.empty()) run_until(freed);  // what still waits to use it finds NaN
}

void release_pinned(void* context) {
  std::unique_ptr<Holder> holder(static_cast<Holder*>(context));
  Lock lock(memory().mutex);
  memory().pinned.erase(static_cast<char*>((*holder)->data));
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = c10::Device(c10::kPrivateUse1, current_device());
    if (!bytes) return {nullptr, device};
    auto& queue = current_queue(device.index());
    auto block = take(bytes, &queue);
    block->written = mark(queue);  // what comes before may still use the memory
    count(ALLOCATIONS), count(LIVE, block->bytes);
    return {block->data, new Holder(block), release_device, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::kCPU};
    auto block = take(bytes, nullptr);
    Lock lock(memory().mutex);
    memory().pinned[static_cast<char*>(block->data)] = block->bytes;
    return {block->data, new Holder(block), release_pinned, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

Block::~Block() {
  std::memset(data, 0xFF, bytes);
  Lock lock(memory().mutex);
  memory().free[bytes].push_back(data);
}

c10::Allocator* device_memory() {
  static auto* one = new DeviceMemory;
  return one;
}

c10::Allocator* pinned_memory() {
  static auto* one = new PinnedMemory;
  return one;
}

bool is_pinned(const void* pointer) {
  auto* address = static_cast<const char*>(pointer);
  Lock lock(memory().mutex);
  auto after = memory().pinned.upper_bound(address);
  return after != memory().pinned.begin() && address < (--after)->first + after->second;
}

Holder block_of(const c10::DataPtr& pointer) {
  auto* holder = pointer.cast_context<Holder>(release_device);
  if (!holder) holder = pointer.cast_context<Holder>(release_pinned);
  return holder ? *holder : nullptr;
}

void record_stream(const c10::DataPtr& pointer, Queue& queue) {
  auto block = block_of(pointer);
  Lock lock(memory().mutex);
  if (block && block->home && block->home != &queue) block->recorded.insert(&queue);
}

void check_use(Block& block, Queue& queue, bool writes, const std::string& what) {
  Lock lock(memory().mutex);
  auto check = [&](const Point& earlier, const char* did) {
    if (ordered(queue, earlier)) return;
    memory().races.push_back(what + " on " + name(queue) + (writes ? " writes" : " reads") + " what " +
                             name(*earlier.queue) + did + ": wait_stream is missing");
  };
  check(block.written, " writes or allocates");
  if (writes)
    for (auto& [reader, point] : block.read) check(point, " reads");
}

void note_use(Block& block, const Point& point, bool writes) {
  Lock lock(memory().mutex);
  if (writes) block.read.clear(), block.written = point;
  else block.read[point.queue] = point;
}

void count(Counter counter, int64_t by) {
  Lock lock(memory().mutex);
  auto& counters = memory().counters;
  counters[counter] += by;
  counters[PEAK] = std::max(counters[PEAK], counters[LIVE]);
}

}  // namespace pretend

// What Python calls through ctypes.
extern "C" {

void pretend_hold(int on) { pretend::hold(on); }

void pretend_stop() { pretend::stop_workers(); }

// Fills `into` with the counters and the number of times that the host waited.
void pretend_counters(int64_t* into) {
  pretend::Lock lock(pretend::memory().mutex);
  std::copy_n(pretend::memory().counters.begin(), pretend::kCounters, into);
  into[pretend::kCounters] = pretend::host_waits(false);
}

// Also forgets the races. What lives goes on to count.
void pretend_reset() {
  pretend::Lock lock(pretend::memory().mutex);
  auto live = pretend::memory().counters[pretend::LIVE];
  pretend::memory().counters = {};
  pretend::memory().counters[pretend::LIVE] = pretend::memory().counters[pretend::PEAK] = live;
  pretend::memory().races.clear();
  pretend::host_waits(true);
}

// One line for each race, in a text that is valid until this thread's next call.
const char* pretend_races() {
  thread_local std::string text;
  text.clear();
  pretend::Lock lock(pretend::memory().mutex);
  for (auto& race : pretend::memory().races) text += race + "\n";
  return text.c_str();
}
}
