// Runs what a command still does when Ctrl-C ends it.
#pragma once

#include <functional>

namespace attnd {

// From here on SIGINT runs `last_words` in a thread of its own, flushes standard output and ends
// the process with exit code 130; a second SIGINT ends it at once. Call before other threads start:
// they inherit that the signal is blocked. Once in a process; `last_words` owns what it reads.
void OnInterrupt(std::function<void()> last_words);

}  // namespace attnd
