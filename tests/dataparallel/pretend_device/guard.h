// The current device and the current stream of each device, per thread.
#pragma once
#include "streams.h"

namespace pretend {

int current_device();
Queue& current_queue(int device);

}  // namespace pretend
