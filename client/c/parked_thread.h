// RunOnParkedThread: runs a job on a thread of its own that waits for the next job afterwards,
// since making a thread costs a small call a quarter of its time. There are as many threads as jobs
// ever ran at once; none ends before the process does. Any thread may call it.
#pragma once

#include <functional>

namespace attnd {

void RunOnParkedThread(std::function<void()> job);

}  // namespace attnd
