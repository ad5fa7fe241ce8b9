#include "base/payload_receiver.h"

#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"

namespace attnd {
namespace {

constexpr int kMostSockets = 16384;
// What is read beside a payload: the next frame's and message's headers fit, and little of the next
// payload, which has a place of its own.
constexpr size_t kBetweenBytes = 512;
// gRPC gives at most 64 slices.
constexpr int kMostPieces = 66;

// A peer is known by its port: its address may be written in several ways.
constexpr int kNoPeer = 0, kUnixPeer = -1;

// The next after ours: the C library's, or a sanitizer's before it. ThreadSanitizer's would look at
// each byte of gRPC's memory, which third_party/sanitizer_defaults.cc leaves out.
ssize_t SystemReceive(int socket, msghdr* message, int flags) {
#if defined(__SANITIZE_THREAD__)
  return syscall(SYS_recvmsg, socket, message, flags);
#else
  static const auto next =
      reinterpret_cast<ssize_t (*)(int, msghdr*, int)>(dlsym(RTLD_NEXT, "recvmsg"));
  if (next == nullptr) return syscall(SYS_recvmsg, socket, message, flags);
  return next(socket, message, flags);
#endif
}

std::atomic<int64_t> placed_bytes{0};
// Of this process there were some: their calls cannot be told from others.
std::atomic<bool> unfollowed_connections{false};

uint64_t CookieOf(int socket) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

int PeerOf(int socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof(there);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) != 0) return kNoPeer;
  if (there.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in&>(there).sin_port);
  }
  if (there.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(there).sin6_port);
  }
  return there.ss_family == AF_UNIX ? kUnixPeer : kNoPeer;
}
int PeerOf(const std::string& grpcs_name) {
  if (absl::StartsWith(grpcs_name, "unix")) return kUnixPeer;
  int port = kNoPeer;
  const bool is_number = absl::SimpleAtoi(grpcs_name.substr(grpcs_name.rfind(':') + 1), &port);
  return is_number ? port : kNoPeer;
}

bool IsUnixSocket(int socket) {
  int family = 0;
  socklen_t size = sizeof(family);
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 && family == AF_UNIX;
}

// By the sockets' numbers.
class Table {
 public:
  static Table& Get() {
    static auto* table = new Table;
    return *table;
  }

  std::shared_ptr<PayloadReceiver> Find(int socket) {
    if (socket < 0 || socket >= kMostSockets) return nullptr;
    Slot& slot = slots_[socket];
    absl::ReaderMutexLock lock(&slot.mutex);
    return slot.receiver;
  }

  void Put(int socket, std::shared_ptr<PayloadReceiver> receiver) {
    const int peer = PeerOf(socket);
    Slot& slot = slots_[socket];
    absl::MutexLock lock(&peers_mutex_);
    Drop(socket, slot.peer);
    slot.peer = peer;
    if (peer != kNoPeer) sockets_of_[peer].push_back(socket);
    absl::MutexLock slot_lock(&slot.mutex);
    slot.receiver = std::move(receiver);
  }

  std::vector<std::shared_ptr<PayloadReceiver>> From(int peer) {
    std::vector<std::shared_ptr<PayloadReceiver>> receivers;
    absl::MutexLock lock(&peers_mutex_);
    auto sockets = sockets_of_.find(peer);
    if (sockets == sockets_of_.end()) return receivers;
    for (int socket : sockets->second) receivers.push_back(Find(socket));
    return receivers;
  }

 private:
  struct Slot {
    absl::Mutex mutex;
    std::shared_ptr<PayloadReceiver> receiver ABSL_GUARDED_BY(mutex);
    int peer = kNoPeer;  // guarded by peers_mutex_
  };

  void Drop(int socket, int peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(peers_mutex_) {
    auto sockets = sockets_of_.find(peer);
    if (sockets == sockets_of_.end()) return;
    std::vector<int>& list = sockets->second;
    list.erase(std::remove(list.begin(), list.end(), socket), list.end());
    if (list.empty()) sockets_of_.erase(sockets);
  }

  std::array<Slot, kMostSockets> slots_;
  absl::Mutex peers_mutex_;
  std::map<int, std::vector<int>> sockets_of_ ABSL_GUARDED_BY(peers_mutex_);
};

// Calls `use` with the pieces of bytes [offset, offset + bytes) of a message's memory.
template <class Use>
void ForEachPiece(const msghdr& message, size_t offset, size_t bytes, Use use) {
  for (size_t n = 0; n < message.msg_iovlen && bytes > 0; ++n) {
    const iovec& piece = message.msg_iov[n];
    if (offset >= piece.iov_len) {
      offset -= piece.iov_len;
      continue;
    }
    const size_t step = std::min(piece.iov_len - offset, bytes);
    use(static_cast<uint8_t*>(piece.iov_base) + offset, step);
    bytes -= step;
    offset = 0;
  }
}

size_t Room(const msghdr& message) {
  size_t bytes = 0;
  for (size_t n = 0; n < message.msg_iovlen; ++n) bytes += message.msg_iov[n].iov_len;
  return bytes;
}

// One read: `straight` bytes to a place of theirs, then `rest` bytes to where gRPC wants them.
struct Read {
  absl::Span<std::byte> straight;
  size_t rest = 0;
  size_t bytes() const { return straight.size() + rest; }
};

// Into memory from byte `offset` of `whole` on; its `control` bytes are those of the last read.
ssize_t Execute(const Read& read, int socket, size_t offset, size_t control, msghdr& whole) {
  std::array<iovec, kMostPieces> pieces;
  size_t count = 0;
  if (!read.straight.empty()) pieces[count++] = {read.straight.data(), read.straight.size()};
  ForEachPiece(whole, offset + read.straight.size(), read.rest, [&](uint8_t* data, size_t size) {
    if (count < pieces.size()) pieces[count++] = {data, size};
  });
  msghdr part = whole;
  part.msg_iov = pieces.data();
  part.msg_iovlen = count;
  part.msg_controllen = control;
  ssize_t got = SystemReceive(socket, &part, 0);
  if (got < 0) return got;
  whole.msg_flags = part.msg_flags;
  whole.msg_namelen = part.msg_namelen;
  whole.msg_controllen = part.msg_controllen;
  return got;
}

}  // namespace

PayloadReceiver::PayloadReceiver(uint64_t cookie, bool unix_socket, Http2Follower::Peer peer)
    : cookie_(cookie), unix_socket_(unix_socket), follower_(peer) {}

std::shared_ptr<PayloadReceiver> PayloadReceiver::Attach(int socket, Http2Follower::Peer peer) {
  if (socket < 0 || socket >= kMostSockets) {
    unfollowed_connections = true;
    return nullptr;
  }
  auto receiver = std::make_shared<PayloadReceiver>(CookieOf(socket), IsUnixSocket(socket), peer);
  Table::Get().Put(socket, receiver);
  return receiver;
}

std::unique_ptr<PayloadReceiver::Placing> PayloadReceiver::Place(const void* first_message,
                                                                 MessagePlacer& placer) {
  absl::MutexLock lock(&mutex_);
  uint32_t stream = follower_.Place(first_message, placer);
  return stream == 0 ? nullptr : std::make_unique<Placing>(shared_from_this(), stream);
}

PayloadReceiver::Placing::~Placing() {
  absl::MutexLock lock(&receiver_->mutex_);
  receiver_->follower_.Forget(stream_);
}

bool PayloadReceiver::Holds(const void* first_message) const {
  return follower_.Holds(first_message);
}

int64_t PayloadReceiver::PlacedBytes() { return placed_bytes; }

// A unix socket is never encrypted, so that what is lost at once there is no caller.
bool PayloadReceiver::HasUnknownCalls() const { return lost_ && !(unix_socket_ && lost_at_once_); }

ssize_t PayloadReceiver::Receive(int socket, msghdr& message) {
  if (CookieOf(socket) != cookie_) return SystemReceive(socket, &message, 0);
  absl::MutexLock lock(&mutex_);
  if (follower_.lost()) return SystemReceive(socket, &message, 0);
  return ReceiveFollowed(socket, message);
}

// As long as the socket has what was asked for: a read for each payload with a place, and beside
// them short ones, so that a payload whose place is not known yet is not read past it.
ssize_t PayloadReceiver::ReceiveFollowed(int socket, msghdr& message) {
  const size_t room = Room(message), control = message.msg_controllen;
  size_t total = 0;
  for (bool between = follower_.placing() > 0; total < room;) {
    Read read;
    read.straight = follower_.Next();
    read.straight = read.straight.first(std::min(read.straight.size(), room - total));
    const bool is_short = between || !read.straight.empty();
    const size_t left = room - total - read.straight.size();
    read.rest = is_short ? std::min(left, kBetweenBytes) : left;
    const ssize_t got = Execute(read, socket, total, control, message);
    if (got <= 0) return total > 0 ? static_cast<ssize_t>(total) : got;
    const size_t straight = std::min(read.straight.size(), static_cast<size_t>(got));
    if (straight > 0) follower_.Skip(static_cast<int64_t>(straight));
    placed_bytes += static_cast<int64_t>(straight);
    ForEachPiece(message, total + straight, static_cast<size_t>(got) - straight,
                 [&](const uint8_t* data, size_t size) {
                   follower_.Feed({data, size});
                 });
    if (follower_.lost()) {
      lost_at_once_ = follower_.lost_at_once();
      lost_ = true;
    }
    total += static_cast<size_t>(got);
    if (static_cast<size_t>(got) < read.bytes()) break;
    between = !read.straight.empty();  // after a short read that led to none, all that there is
  }
  return static_cast<ssize_t>(total);
}

std::unique_ptr<PayloadReceiver::Placing> PlaceMessagesFrom(const std::string& peer,
                                                            const void* first_message,
                                                            MessagePlacer& placer) {
  if (unfollowed_connections) return nullptr;
  PayloadReceiver* holder = nullptr;
  const auto receivers = Table::Get().From(PeerOf(peer));
  for (const auto& receiver : receivers) {
    if (receiver == nullptr) continue;
    if (receiver->HasUnknownCalls()) return nullptr;
    if (receiver->Holds(first_message)) holder = receiver.get();
  }
  return holder == nullptr ? nullptr : holder->Place(first_message, placer);
}

ssize_t ReceiveMessage(int socket, msghdr* message, int flags) {
  if (flags == 0) {
    auto receiver = Table::Get().Find(socket);
    if (receiver != nullptr) return receiver->Receive(socket, *message);
  }
  return SystemReceive(socket, message, flags);
}

}  // namespace attnd
