// Queues of work, each with a worker thread, and what is known about the order of their work. No torch here.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace pretend {

constexpr int kDevices = 4;

struct Queue;
// How far into each queue something is ordered after it: a vector clock.
using Clock = std::map<const Queue*, uint64_t>;

// A place in a queue, behind the first `ticket` pieces of its work.
struct Point {
  Queue* queue = nullptr;
  uint64_t ticket = 0;
  Clock seen = {};
};

// Queue 0 of a device is its default stream.
Queue& find(int device, int64_t id);
int64_t next_id(int device);
std::string name(const Queue& queue);

// Work is pushed at once and runs later: on the worker, or on the first thread that waits for it.
Point push(Queue& queue, std::function<void()> task);
// At once if there is nothing to run before it.
Point push_or_run(Queue& queue, std::function<void()> task);
Point mark(Queue& queue);
// All later work of `queue` runs after `point`.
void wait(Queue& queue, const Point& point);
// All pushed work runs; then the caller's own piece of work counts as next in the queue, and as done.
Point run_now(Queue& queue);
void run_until(const Point& point);

// The host waits; from now on all new work anywhere is ordered after `point`.
void finish(const Point& point);
void finish_device(int device);
bool finished(const Point& point);
uint64_t host_waits(bool reset);

// Whether work that is pushed to `queue` now is sure to run after `point`.
bool ordered(const Queue& queue, const Point& point);

// While held, workers rest and work runs only when someone waits for it.
void hold(bool on);
void stop_workers();

}  // namespace pretend
