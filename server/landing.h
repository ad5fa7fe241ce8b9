// Landing: the one copy of a received byte, from gRPC's slices to its aligned place in staging
// memory. Any thread.
#pragma once

#include <cstddef>

#include "base/thread_pool.h"
#include "server/call.h"

namespace attnd {

// Copies each input of `call` to its place; `destination` is indexed by Tensor. Large tensors are
// cut into pieces that the pool's threads share. Returns the bytes copied.
int64_t Land(const AttentionCall& call, std::byte* const* destination, ThreadPool& pool);

}  // namespace attnd
