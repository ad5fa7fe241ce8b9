#include "client/cpp/connection_sockets.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

#include "base/congestion_control.h"
#include "base/socket_observer.h"
#include "base/unix_socket_buffer.h"

namespace attnd {
namespace {

// A channel has one connection; while it reconnects a second socket may stand beside it.
constexpr size_t kMostDuplicates = 2;

}  // namespace

void ConnectionSockets::Watch(std::shared_ptr<ConnectionSockets> sockets,
                              grpc::ChannelArguments& arguments) {
  ObserveSockets([sockets = std::move(sockets)](int socket) { return sockets->OnOpen(socket); },
                 arguments);
}

ConnectionSockets::~ConnectionSockets() {
  for (int socket : duplicates_) close(socket);
}

bool ConnectionSockets::OnOpen(int socket) {
  absl::MutexLock lock(&mutex_);
  if (shut_down_) return false;
  if (this_host_) SetCongestionControl(socket, kLoopbackCongestion);
  WidenIfUnixSocket(socket);
  receivers_.push_back(PayloadReceiver::Attach(socket, Http2Follower::Peer::kServer));
  if (receivers_.size() > kMostDuplicates) receivers_.pop_front();
  int duplicate = fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return true;  // out of descriptors: the connection works, unwatched
  duplicates_.push_back(duplicate);
  if (duplicates_.size() > kMostDuplicates) {
    close(duplicates_.front());
    duplicates_.pop_front();
  }
  return true;
}

std::unique_ptr<PayloadReceiver::Placing> ConnectionSockets::Place(const void* first_message,
                                                                   MessagePlacer& placer) {
  absl::MutexLock lock(&mutex_);
  for (const auto& receiver : receivers_) {
    if (receiver == nullptr || !receiver->Holds(first_message)) continue;
    return receiver->Place(first_message, placer);
  }
  return nullptr;
}

void ConnectionSockets::Shutdown() {
  absl::MutexLock lock(&mutex_);
  shut_down_ = true;
  for (int socket : duplicates_) shutdown(socket, SHUT_RDWR);
}

}  // namespace attnd
