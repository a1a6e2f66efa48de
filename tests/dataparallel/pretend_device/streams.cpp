#include "streams.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pretend {

constexpr int kStreams = 33;  // with the default one; as many as CUDA's pool

struct Queue {
  int device, id;
  std::deque<std::function<void()>> tasks = {};
  uint64_t pushed = 0, done = 0;
  bool running = false;
  Clock seen = {};
  std::thread worker = {};
};

namespace {

// One lock for all: tests are small. Never destroyed: threads and tensors may outlive static objects.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Queue> queues;
  std::array<int, kDevices> taken{};
  Clock host;
  uint64_t waits = 0;
  int holds = 0;
  bool stopped = false;
  pid_t process = getpid();
};

World& world() {
  static World* one = [] {
    auto* w = new World;
    for (int q = 0; q < kDevices * kStreams; ++q) w->queues.push_back(Queue{q / kStreams, q % kStreams});
    return w;
  }();
  return *one;
}

using Lock = std::unique_lock<std::mutex>;

void merge(Clock& into, const Clock& from) {
  for (auto& [queue, ticket] : from) into[queue] = std::max(into[queue], ticket);
}

void step(Queue& queue, Lock& lock) {
  auto task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  queue.running = true;
  lock.unlock();
  task();
  task = nullptr;  // what it holds is let go without the lock
  lock.lock();
  queue.running = false;
  ++queue.done;
  world().changed.notify_all();
}

// No deadlock: a piece of work waits only for work that was pushed before it.
void run_until(Queue& queue, uint64_t ticket, Lock& lock) {
  while (queue.done < ticket) {
    if (queue.running) world().changed.wait(lock);
    else step(queue, lock);
  }
}

void work(Queue& queue) {
  auto& w = world();
  Lock lock(w.mutex);
  while (true) {
    w.changed.wait(lock, [&] { return w.stopped || (!w.holds && !queue.running && !queue.tasks.empty()); });
    if (w.stopped) return;
    step(queue, lock);
  }
}

Point here(Queue& queue) {
  queue.seen[&queue] = queue.pushed;
  return {&queue, queue.pushed, queue.seen};
}

// Static objects of libraries die after this one, which was made after them: no worker runs while they do.
struct AtExit {
  ~AtExit() { stop_workers(); }
} at_exit;

}  // namespace

Queue& find(int device, int64_t id) { return world().queues.at(device * kStreams + id); }

int64_t next_id(int device) {
  Lock lock(world().mutex);
  return 1 + world().taken[device]++ % (kStreams - 1);
}

std::string name(const Queue& queue) {
  return "pretend:" + std::to_string(queue.device) + " stream " + std::to_string(queue.id);
}

Point push(Queue& queue, std::function<void()> task) {
  auto& w = world();
  Lock lock(w.mutex);
  queue.tasks.push_back(std::move(task));
  ++queue.pushed;
  if (!queue.worker.joinable() && !w.stopped) queue.worker = std::thread(work, std::ref(queue));
  w.changed.notify_all();
  return here(queue);
}

Point push_or_run(Queue& queue, std::function<void()> task) {
  {
    Lock lock(world().mutex);
    if (queue.running || !queue.tasks.empty()) {
      lock.unlock();
      return push(queue, std::move(task));
    }
  }
  task();
  return mark(queue);
}

Point mark(Queue& queue) {
  Lock lock(world().mutex);
  return here(queue);
}

void wait(Queue& queue, const Point& point) {
  if (!point.queue || point.queue == &queue) return;
  {
    Lock lock(world().mutex);
    merge(queue.seen, point.seen);
  }
  push(queue, [point] { run_until(point); });
}

Point run_now(Queue& queue) {
  Lock lock(world().mutex);
  while (!queue.tasks.empty() || queue.running) run_until(queue, queue.pushed, lock);
  ++queue.pushed, ++queue.done;
  return here(queue);
}

void run_until(const Point& point) {
  Lock lock(world().mutex);
  run_until(*point.queue, point.ticket, lock);
}

void finish(const Point& point) {
  if (!point.queue) return;
  Lock lock(world().mutex);
  ++world().waits;
  run_until(*point.queue, point.ticket, lock);
  merge(world().host, point.seen);
}

void finish_device(int device) {
  Lock lock(world().mutex);
  ++world().waits;
  for (int id = 0; id < kStreams; ++id) {
    auto point = here(world().queues[device * kStreams + id]);
    run_until(*point.queue, point.ticket, lock);
    merge(world().host, point.seen);
  }
}

bool finished(const Point& point) {
  if (!point.queue) return true;
  auto& w = world();
  Lock lock(w.mutex);
  if (point.queue->done >= point.ticket) {
    merge(w.host, point.seen);
    return true;
  }
  if (w.holds && !point.queue->running) step(*point.queue, lock);  // or who polls would poll forever
  return false;
}

uint64_t host_waits(bool reset) {
  Lock lock(world().mutex);
  return reset ? std::exchange(world().waits, 0) : world().waits;
}

bool ordered(const Queue& queue, const Point& point) {
  if (!point.queue || point.queue == &queue) return true;
  Lock lock(world().mutex);
  auto covers = [&](const Clock& clock) {
    auto found = clock.find(point.queue);
    return found != clock.end() && found->second >= point.ticket;
  };
  return covers(queue.seen) || covers(world().host);
}

void hold(bool on) {
  Lock lock(world().mutex);
  world().holds += on ? 1 : -1;
  world().changed.notify_all();
}

void stop_workers() {
  auto& w = world();
  if (getpid() != w.process) return;  // a fork has no workers
  {
    Lock lock(w.mutex);
    w.stopped = true;
    w.changed.notify_all();
  }
  for (auto& queue : w.queues)
    if (queue.worker.joinable()) queue.worker.join();
}

}  // namespace pretend
