// Device and pinned memory: host memory that is NaN when new and NaN again once freed, in the order of its streams.
#pragma once
#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace pretend {

struct Block {
  void* data;
  size_t bytes;
  Queue* home;  // the stream it was allocated on; none for pinned memory
  Point written = {};
  std::map<Queue*, Point> read = {};
  std::set<Queue*> recorded = {};
  ~Block();
};

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* pointer);

// Null for other memory.
std::shared_ptr<Block> block_of(const c10::DataPtr& pointer);
void record_stream(const c10::DataPtr& pointer, Queue& queue);

// Take note of a use by work that is pushed to `queue` next; unordered uses are races.
void check_use(Block& block, Queue& queue, bool writes, const std::string& what);
void note_use(Block& block, const Point& point, bool writes);

enum Counter { H2D, D2H, D2D, LOCAL, H2D_BYTES, D2H_BYTES, D2D_BYTES, LOCAL_BYTES, KERNELS, ALLOCATIONS, PINNED, LIVE, PEAK, kCounters };
void count(Counter counter, int64_t by = 1);

}  // namespace pretend
