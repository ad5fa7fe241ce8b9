#include "base/received_slices.h"

#include <grpc/event_engine/memory_allocator.h>
#include <grpc/slice.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <cstddef>
#include <limits>

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/core/lib/iomgr/tcp_posix.cc, maybe_make_read_slices");

namespace attnd {
namespace {

using grpc_event_engine::experimental::MemoryAllocator;
using grpc_event_engine::experimental::MemoryRequest;

// gRPC's own are this large, or eight times.
constexpr size_t kSmallSlice = 8 << 10;

std::atomic<int64_t> received_bytes{0};
std::atomic<int64_t> small_beyond{std::numeric_limits<int64_t>::max()};

void Release(void* slice) {
  auto* made = static_cast<grpc_slice*>(slice);
  received_bytes -= static_cast<int64_t>(GRPC_SLICE_LENGTH(*made));
  grpc_slice_unref(*made);
  delete made;
}

}  // namespace

const std::atomic<int64_t>& ReceivedSliceBytes() { return received_bytes; }
void SetReceivedSlicesSmallBeyond(int64_t bytes) { small_beyond = bytes; }

// MemoryAllocator::MakeSlice, and what is called in its place (linkopts in BUILD).
grpc_slice MakeSlice(MemoryAllocator* allocator, MemoryRequest request) __asm__(
    "__real__ZN17grpc_event_engine12experimental15MemoryAllocator9MakeSliceENS0_13MemoryRequestE");
grpc_slice MakeCountedSlice(MemoryAllocator* allocator, MemoryRequest request) __asm__(
    "__wrap__ZN17grpc_event_engine12experimental15MemoryAllocator9MakeSliceENS0_13MemoryRequestE");

grpc_slice MakeCountedSlice(MemoryAllocator* allocator, MemoryRequest request) {
  const bool is_small = received_bytes >= small_beyond;
  const size_t bytes = is_small ? std::min(request.max(), kSmallSlice) : request.max();
  auto* made = new grpc_slice(MakeSlice(allocator, MemoryRequest(bytes)));
  received_bytes += static_cast<int64_t>(GRPC_SLICE_LENGTH(*made));
  return grpc_slice_new_with_user_data(GRPC_SLICE_START_PTR(*made), GRPC_SLICE_LENGTH(*made),
                                       Release, made);
}

}  // namespace attnd
