// SendLedger: counts the slices of one request that still point into the caller's arrays. gRPC may
// hold a slice after the call that sent it has ended (a cancelled call's bytes can stand in a
// connection's write buffer), so the arrays are the caller's again only when none is left.
//
// TCP ends a write to a peer that has stopped reading; a unix socket waits for as long as the peer
// lives. A ledger for unix sockets therefore lends nothing, and payloads are copied.
//
// The ledger outlives its slices. Threads: any; slices are released on gRPC's.
#pragma once

#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>

namespace attnd {

class SendLedger {
 public:
  explicit SendLedger(bool lends = true) : lends_(lends) {}

  bool lends() const { return lends_; }
  // A slice over the caller's memory: no copy.
  grpc::Slice Lend(const void* data, int64_t bytes) {
    lent_.fetch_add(1, std::memory_order_relaxed);
    return grpc::Slice(const_cast<void*>(data), static_cast<size_t>(bytes), &SendLedger::Return,
                       this);
  }
  bool AllReturned() const { return lent_.load(std::memory_order_acquire) == 0; }

 private:
  static void Return(void* ledger) {
    static_cast<SendLedger*>(ledger)->lent_.fetch_sub(1, std::memory_order_release);
  }
  const bool lends_;
  std::atomic<int64_t> lent_{0};
};

}  // namespace attnd
