// BorrowedSlices: counts the slices of one request that still point into the caller's arrays. gRPC
// may hold a slice after the call that sent it has ended (a cancelled call's bytes can stand in a
// connection's write buffer), so a call returns its caller's arrays only when none is left.
//
// TCP ends a write to a peer that has stopped reading; a write to a unix socket hangs for as long
// as the peer lives. Requests over unix sockets therefore borrow nothing: encoders copy.
//
// It outlives its slices. Threads: any; gRPC releases slices on threads of its own.
#pragma once

#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>

namespace attnd {

class BorrowedSlices {
 public:
  explicit BorrowedSlices(bool allowed = true) : allowed_(allowed) {}

  bool allowed() const { return allowed_; }
  // A slice over the caller's memory: no copy.
  grpc::Slice Borrow(const void* data, int64_t bytes) {
    count_.fetch_add(1, std::memory_order_relaxed);
    return grpc::Slice(const_cast<void*>(data), static_cast<size_t>(bytes),
                       &BorrowedSlices::Release, this);
  }
  bool AllReturned() const { return count_.load(std::memory_order_acquire) == 0; }

 private:
  static void Release(void* slices) {
    static_cast<BorrowedSlices*>(slices)->count_.fetch_sub(1, std::memory_order_release);
  }

  const bool allowed_;
  std::atomic<int64_t> count_{0};
};

}  // namespace attnd
