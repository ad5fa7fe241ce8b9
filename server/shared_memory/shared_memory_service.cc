#include "server/shared_memory/shared_memory_service.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "net/descriptor_socket.h"
#include "proto/attnd/v1/shared_memory.pb.h"

namespace attnd {
namespace {

constexpr absl::Duration kPauseWithoutDescriptors = absl::Milliseconds(200);
constexpr int kBacklog = 64;

// 0, root, is nobody's default: an unknown user shares the quota of all unknown ones.
uint32_t UserOf(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return ~uint32_t{0};
  return peer.uid;
}

}  // namespace

// One control connection. Its descriptor is shared with the session's on_ended, which calls use.
class SharedMemoryService::Connection {
 public:
  Connection(FileDescriptor fd, absl::Time now, SharedMemoryTable& table, const Authenticator& auth)
      : fd_(std::move(fd)),
        opened_at_(now),
        user_id_(UserOf(fd_.get())),
        table_(table),
        auth_(auth),
        session_(std::make_shared<SharedSession>([this](uint64_t use) { SendEnded(use); })) {}
  ~Connection() { table_.Close(session_); }

  // False: to be closed.
  bool ServeOne() {
    Packet packet;
    SocketResult result = ReceivePacket(fd_.get(), false, packet);
    if (result == SocketResult::kWouldBlock) return true;
    v1::SharedMemoryRequest request;
    if (result == SocketResult::kClosed || packet.truncated ||
        !request.ParseFromString(packet.bytes)) {
      return false;
    }
    switch (request.kind_case()) {
      case v1::SharedMemoryRequest::kAddRegion:
        return Add(request.add_region(), packet.descriptors);
      case v1::SharedMemoryRequest::kEndUse:
        return packet.descriptors.empty() && EndUse(request.end_use().use());
      default:
        return false;
    }
  }

  bool IdleAt(absl::Time now) const { return !has_region_ && now - opened_at_ >= kIdleTime; }
  bool has_region() const { return has_region_; }

 private:
  bool Add(const v1::AddRegion& request, const std::vector<FileDescriptor>& descriptors) {
    if (descriptors.size() != 1) return false;
    v1::SharedMemoryReply reply;
    absl::StatusOr<AddedRegion> added = AddTo(request, descriptors.front().get());
    if (added.ok()) {
      has_region_ = true;
      reply.set_region(added->token);
      reply.set_proof(added->proof);
      reply.set_kept_outputs(added->kept_outputs);
      reply.set_modules(true);
    } else {
      reply.set_error(std::string(added.status().message()));
    }
    return Send(reply);
  }

  absl::StatusOr<AddedRegion> AddTo(const v1::AddRegion& request, int descriptor) {
    ASSIGN_OR_RETURN(std::string caller, auth_.IdentifyLocal(request.authorization()));
    RegionOwner owner{session_, user_id_, std::move(caller)};
    return table_.Add(owner, descriptor, request.size(), request.proof());
  }

  bool EndUse(uint64_t use) {
    SharedSession::End end = session_->EndUse(use);
    if (end == SharedSession::End::kRuns) return true;
    if (end == SharedSession::End::kTooMany) return false;
    return SendEnded(use);
  }

  bool SendEnded(uint64_t use) {
    v1::SharedMemoryReply reply;
    reply.set_ended_use(use);
    return Send(reply);
  }

  // A peer that does not read what he asked for is cut off; the thread sees that as a hang-up.
  bool Send(const v1::SharedMemoryReply& reply) {
    if (SendPacket(fd_.get(), reply.SerializeAsString(), -1, false) == SocketResult::kDone) {
      return true;
    }
    shutdown(fd_.get(), SHUT_RDWR);
    return false;
  }

  const FileDescriptor fd_;
  const absl::Time opened_at_;
  const uint32_t user_id_;
  SharedMemoryTable& table_;
  const Authenticator& auth_;
  bool has_region_ = false;
  const std::shared_ptr<SharedSession> session_;  // also the regions' and their calls'
};

absl::StatusOr<std::unique_ptr<SharedMemoryService>> SharedMemoryService::Start(
    const std::string& unix_path, int max_connections, SharedMemoryTable& table,
    const Authenticator& auth, Logger& log) {
  std::string path = absl::StrCat(unix_path, kSharedMemorySuffix);
  UnixSocket::RemoveFile(path);  // a dead daemon's, or of one whose PATH this one has taken
  ASSIGN_OR_RETURN(UnixSocket socket,
                   UnixSocket::Listen(absl::StrCat("unix:", path), SOCK_SEQPACKET, kBacklog));
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid())
    return absl::UnavailableError(absl::StrCat("shared memory: eventfd: ", strerror(errno)));
  return std::unique_ptr<SharedMemoryService>(new SharedMemoryService(
      std::move(path), std::move(socket), std::move(wake), max_connections, table, auth, log));
}

SharedMemoryService::SharedMemoryService(std::string path, UnixSocket socket, FileDescriptor wake,
                                         int max_connections, SharedMemoryTable& table,
                                         const Authenticator& auth, Logger& log)
    : path_(std::move(path)),
      socket_(std::move(socket)),
      wake_(std::move(wake)),
      max_connections_(max_connections),
      table_(table),
      auth_(auth),
      log_(log),
      thread_([this] { Serve(); }) {}

SharedMemoryService::~SharedMemoryService() {
  uint64_t one = 1;
  CHECK(write(wake_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
  connections_.clear();
}

int SharedMemoryService::PollTimeout(absl::Time now) const {
  bool waits = now < accept_again_;
  for (const auto& [fd, connection] : connections_) waits = waits || !connection->has_region();
  return waits ? static_cast<int>(absl::ToInt64Milliseconds(kPauseWithoutDescriptors)) : -1;
}

void SharedMemoryService::Serve() {
  std::vector<pollfd> polled;
  while (true) {
    absl::Time now = SteadyNow();
    polled.assign({{wake_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}});
    if (now < accept_again_) polled[1].events = 0;
    for (const auto& [fd, connection] : connections_) polled.push_back({fd, POLLIN, 0});
    if (poll(polled.data(), polled.size(), PollTimeout(now)) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    for (size_t n = 2; n < polled.size(); ++n) {
      if (polled[n].revents == 0) continue;
      if (!connections_[polled[n].fd]->ServeOne()) connections_.erase(polled[n].fd);
    }
    now = SteadyNow();
    CloseIdle(now);
    if (polled[1].revents != 0) Accept(now);
    connection_count_ = static_cast<int>(connections_.size());
  }
}

void SharedMemoryService::Accept(absl::Time now) {
  FileDescriptor fd(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
      accept_again_ = now + kPauseWithoutDescriptors;
      log_.Log(Severity::kWarning, "shared_memory_accept", {{"error", strerror(errno)}});
    }
    return;
  }
  if (static_cast<int>(connections_.size()) >= max_connections_) return;  // closed: he falls back
  int key = fd.get();
  connections_[key] = std::make_unique<Connection>(std::move(fd), now, table_, auth_);
}

void SharedMemoryService::CloseIdle(absl::Time now) {
  std::erase_if(connections_, [now](const auto& entry) { return entry.second->IdleAt(now); });
}

}  // namespace attnd
