// ConnectionSockets: a hold on the sockets of one gRPC channel, so that they can be shut down.
//
// gRPC 1.51 closes a connection only when its running write has ended, and a write to a peer that
// has stopped reading ends when TCP gives up, or over a unix socket never. Its buffer may hold
// slices of a caller's array. Shutting the socket down ends the write at once.
//
// Threads: any.
#pragma once

#include <grpcpp/support/channel_arguments.h>

#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/payload_receiver.h"

namespace attnd {

class ConnectionSockets {
 public:
  // `this_host`: that is where they will be connected to.
  explicit ConnectionSockets(bool this_host = false) : this_host_(this_host) {}
  ~ConnectionSockets();
  ConnectionSockets(const ConnectionSockets&) = delete;
  ConnectionSockets& operator=(const ConnectionSockets&) = delete;

  // Makes channels created with `arguments` tell `sockets` of each socket they open. shared_ptr:
  // the channel keeps it as long as it may open one.
  static void Watch(std::shared_ptr<ConnectionSockets> sockets, grpc::ChannelArguments& arguments);

  // Ends reading and writing on the sockets, and on any opened later.
  void Shutdown();

  // Of a stream of theirs: PayloadReceiver::Place.
  std::unique_ptr<PayloadReceiver::Placing> Place(const void* first_message, MessagePlacer& placer);

  // Of gRPC: a socket was opened. False when it must not be used.
  bool OnOpen(int socket);

 private:
  const bool this_host_;
  absl::Mutex mutex_;
  // Duplicates of the newest sockets: their numbers stay ours when gRPC closes its own.
  std::deque<int> duplicates_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<PayloadReceiver>> receivers_ ABSL_GUARDED_BY(mutex_);  // of these
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attnd
