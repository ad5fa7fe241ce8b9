#include "base/received_slices.h"

#include <grpc/event_engine/memory_allocator.h>
#include <grpc/slice.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/core/lib/iomgr/tcp_posix.cc, maybe_make_read_slices");

namespace attnd {
namespace {

using grpc_event_engine::experimental::MemoryAllocator;
using grpc_event_engine::experimental::MemoryRequest;
using grpc_event_engine::experimental::internal::MemoryAllocatorImpl;

// gRPC's own are this large, or eight times.
constexpr size_t kSmallSlice = 8 << 10;

std::atomic<int64_t> received_bytes{0};
std::atomic<int64_t> small_beyond{std::numeric_limits<int64_t>::max()};

// What a thread has taken and given back and not told yet: threads that move gigabytes a second
// would wait for each other at one number.
class Untold {
 public:
  ~Untold() { Tell(); }
  void Add(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ >= kUntoldReceivedBytes || bytes_ <= -kUntoldReceivedBytes) Tell();
  }

 private:
  void Tell() { received_bytes += std::exchange(bytes_, 0); }

  int64_t bytes_ = 0;
};
thread_local Untold untold;

class CountedMemory final : public MemoryAllocatorImpl {
 public:
  size_t Reserve(MemoryRequest request) override {
    untold.Add(static_cast<int64_t>(request.max()));
    return request.max();
  }
  void Release(size_t bytes) override { untold.Add(-static_cast<int64_t>(bytes)); }
  void Shutdown() override {}
};

}  // namespace

const std::atomic<int64_t>& ReceivedSliceBytes() { return received_bytes; }
void SetReceivedSlicesSmallBeyond(int64_t bytes) { small_beyond = bytes; }

// MemoryAllocator::MakeSlice, and what is called in its place (linkopts in BUILD).
grpc_slice MakeSlice(MemoryAllocator* allocator, MemoryRequest request) __asm__(
    "__real__ZN17grpc_event_engine12experimental15MemoryAllocator9MakeSliceENS0_13MemoryRequestE");
grpc_slice MakeCountedSlice(MemoryAllocator* allocator, MemoryRequest request) __asm__(
    "__wrap__ZN17grpc_event_engine12experimental15MemoryAllocator9MakeSliceENS0_13MemoryRequestE");

// From an allocator of ours: one that wrapped a slice of gRPC's would allocate three times for
// each.
grpc_slice MakeCountedSlice(MemoryAllocator*, MemoryRequest request) {
  static auto* const counted = new MemoryAllocator(std::make_shared<CountedMemory>());
  const bool is_small = received_bytes >= small_beyond;
  const size_t bytes = is_small ? std::min(request.max(), kSmallSlice) : request.max();
  return MakeSlice(counted, MemoryRequest(bytes));
}

}  // namespace attnd
