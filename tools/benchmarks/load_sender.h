// LoadSender: forward calls of one shape sent as bytes made once, unary or streamed, over several
// connections and without retries, so that a load costs its sender little. A streamed call sends
// its header, then chunk after chunk as each leaves, as attnd's own clients do; a refusal ends it
// wherever it is. Send: one thread. Completions are taken by a thread for each connection.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

using LoadClock = std::chrono::steady_clock;
using LoadSeconds = std::chrono::duration<double>;

// Counts how calls ended.
struct LoadOutcome {
  std::vector<double> accepted;         // seconds from when they were due
  std::vector<double> refused;          // by admission: seconds from when they were sent
  std::map<std::string, int64_t> lost;  // others, by reason, or by code where there is none
  double late = 0;                      // the most that a call was sent after it was due
  struct Share {
    int64_t sent = 0, accepted = 0;
  };
  std::map<double, Share> by_deadline;  // in seconds
};

class LoadSender {
 public:
  LoadSender(const std::string& address, int connections, const v1::ForwardRequest& request,
             bool streamed);
  ~LoadSender();

  void Send(LoadClock::time_point due, LoadSeconds deadline);
  int in_flight() const { return in_flight_; }
  void WaitUntilIdle() const;
  LoadOutcome Take();

 private:
  class Call;
  class UnaryCall;
  class StreamCall;
  void Collect(grpc::CompletionQueue& queue);
  void Count(const Call& call);

  const bool streamed_;
  grpc::ByteBuffer request_;                // of a unary call
  std::vector<grpc::ByteBuffer> messages_;  // of a streamed one
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> queues_;
  size_t next_ = 0;
  std::atomic<int> in_flight_{0};
  std::mutex mutex_;
  LoadOutcome outcome_;  // under mutex_
  std::vector<std::thread> threads_;
};

}  // namespace attnd
