// CopyNonTemporal: memcpy with stores that go past the caches, for destinations larger than the
// caches, which would be evicted before they are read. It saves the read of each line that a store
// misses: 8 to 20 % more throughput where tensors land (16 cores, 8 channels, loopback).
// Threads: any.
#pragma once

#include <cstddef>

namespace attnd {

// From 2 MiB on up to `most_threads` take parts of 1 MiB; pieces of messages are smaller. 0: half
// of the CPUs, since others use them too, and at most eight.
void CopyNonTemporal(std::byte* to, const std::byte* from, size_t size, int most_threads = 0);

}  // namespace attnd
