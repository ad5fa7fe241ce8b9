#include "base/payload_receiver.h"

#include <dlfcn.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "base/event_order.h"

namespace attnd {
namespace {

constexpr int kMostSockets = 16384;
// What is read beside a payload: the next frame's and message's headers fit, and little of the next
// payload, which has a place of its own.
constexpr size_t kBetweenBytes = 512;
// What may come from a held peer before the kernel tells of it: more than its window is then.
constexpr int kHeldBytes = 64 << 10;
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
thread_local std::shared_ptr<PayloadReceiver> begins_tls;

uint64_t CookieOf(int socket) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

int PortOf(const std::string& grpcs_name) {
  if (absl::StartsWith(grpcs_name, "unix")) return kUnixPeer;
  int port = kNoPeer;
  const bool is_number = absl::SimpleAtoi(grpcs_name.substr(grpcs_name.rfind(':') + 1), &port);
  return is_number ? port : kNoPeer;
}

int64_t BytesThere(int socket) {
  int bytes = 0;
  return ioctl(socket, FIONREAD, &bytes) == 0 ? bytes : 0;
}

int64_t BytesSent(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return static_cast<int64_t>(info.tcpi_bytes_acked);
}

int64_t BytesUnacknowledged(int socket) {
  int bytes = 0;
  return ioctl(socket, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void SetLeastToTell(int socket, int bytes) {
  setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof(bytes));
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
    Slot& slot = slots_[socket];
    absl::MutexLock lock(&slot.mutex);
    slot.receiver = std::move(receiver);
  }

 private:
  struct Slot {
    absl::Mutex mutex;
    std::shared_ptr<PayloadReceiver> receiver ABSL_GUARDED_BY(mutex);
  };
  std::array<Slot, kMostSockets> slots_;
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

void ForgetFirstMessages(const msghdr& message, size_t bytes) {
  ForEachPiece(message, 0, bytes, [](const uint8_t* data, size_t size) {
    Http2Follower::ForgetFirstMessages({data, size});
  });
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

ssize_t ReceiveUnfollowed(int socket, msghdr& message, int flags) {
  const ssize_t got = SystemReceive(socket, &message, flags);
  if (got > 0) ForgetFirstMessages(message, static_cast<size_t>(got));
  return got;
}

}  // namespace

PayloadReceiver::PayloadReceiver(int socket, Http2Follower::Peer peer,
                                 std::shared_ptr<HeldPeers> held,
                                 std::shared_ptr<ReceiveMemory> memory)
    : socket_(socket),
      cookie_(CookieOf(socket)),
      peer_(PeerOf(socket)),
      held_peers_(std::move(held)),
      memory_(std::move(memory)),
      follower_(peer, socket) {
  const bool is_tcp = peer_.port > 0;
  if (held_peers_ != nullptr && held_peers_->limits().frames_per_second > 0 && is_tcp) {
    wasted_.emplace(held_peers_->limits(), HeldPeers::Time());
  }
}

PayloadReceiver::PeerName PayloadReceiver::PeerOf(int socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof(there);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) != 0) return {};
  if (there.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(there);
    return {ntohs(four.sin_port), four.sin_addr.s_addr};
  }
  if (there.ss_family != AF_INET6) return {there.ss_family == AF_UNIX ? kUnixPeer : kNoPeer};
  const auto& six = reinterpret_cast<const sockaddr_in6&>(there);
  const bool is_four = IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
  PeerName name = {ntohs(six.sin6_port)};
  std::memcpy(&name.address, six.sin6_addr.s6_addr + (is_four ? 8 : 0), sizeof(name.address));
  return name;
}

std::shared_ptr<PayloadReceiver> PayloadReceiver::Attach(int socket, Http2Follower::Peer peer,
                                                         std::shared_ptr<HeldPeers> held,
                                                         std::shared_ptr<ReceiveMemory> memory) {
  if (socket < 0 || socket >= kMostSockets) return nullptr;
  auto receiver =
      std::make_shared<PayloadReceiver>(socket, peer, std::move(held), std::move(memory));
  receiver->Begin();
  if (receiver->memory_ != nullptr) receiver->memory_->Join(receiver);
  Table::Get().Put(socket, receiver);
  EventOrder::Get().Announce(socket);
  return receiver;
}

// Held, where its address is in debt.
void PayloadReceiver::Begin() {
  absl::MutexLock lock(&mutex_);
  if (wasted_.has_value()) TakeHold({held_peers_->FirstHold(peer_.address, HeldPeers::Time())});
}

PayloadReceiver::BeginningTls::BeginningTls(std::shared_ptr<PayloadReceiver> receiver) {
  begins_tls = std::move(receiver);
}
PayloadReceiver::BeginningTls::~BeginningTls() { begins_tls.reset(); }

std::shared_ptr<PayloadReceiver> PayloadReceiver::BeginTls() {
  std::shared_ptr<PayloadReceiver> receiver = std::exchange(begins_tls, nullptr);
  if (receiver == nullptr) return nullptr;
  absl::MutexLock lock(&receiver->mutex_);
  receiver->is_tls_ = true;
  return receiver;
}

void PayloadReceiver::Decrypted(absl::Span<const uint8_t> bytes) {
  absl::MutexLock lock(&mutex_);
  follower_.Feed(bytes);
  EventOrder::Get().OnMoves(socket_, follower_.TakeLargest());
  if (!wasted_.has_value()) return;
  wasted_->FeedDecrypted(bytes);
  to_judge_ = true;
}

// All of it has been sent by now.
void PayloadReceiver::TakeHandshake() {
  absl::MutexLock lock(&mutex_);
  handshake_bytes_ = BytesSent(socket_) + BytesUnacknowledged(socket_);
  answers_ = true;
}

std::unique_ptr<PayloadReceiver::Placing> PayloadReceiver::Place(const void* first_message,
                                                                 MessagePlacer& placer) {
  absl::MutexLock lock(&mutex_);
  const uint32_t stream = is_tls_ ? 0 : follower_.Place(first_message, placer);
  return stream == 0 ? nullptr : std::make_unique<Placing>(shared_from_this(), stream);
}

PayloadReceiver::Placing::~Placing() {
  absl::MutexLock lock(&receiver_->mutex_);
  receiver_->follower_.Forget(stream_);
}

int64_t PayloadReceiver::PlacedBytes() { return placed_bytes; }

bool PayloadReceiver::IsAnothers() const { return CookieOf(socket_) != cookie_; }

// Asked where it matters alone, since that is a system call: to have followed what another socket
// of this number brings does no harm.
ssize_t PayloadReceiver::Receive(msghdr& message) {
  absl::MutexLock lock(&mutex_);
  const bool matters =
      hold_.has_value() || waits_for_memory_ || is_reset_ || follower_.placing() > 0;
  if (matters && IsAnothers()) return ReceiveUnfollowed(socket_, message, 0);
  if (is_reset_) {
    errno = ECONNRESET;
    return -1;
  }
  if (std::exchange(to_judge_, false)) Judge();
  if (!HasMemory()) return WaitForMemory(message);
  return hold_.has_value() ? ReceiveHeld(message) : ReceiveSome(message);
}

bool PayloadReceiver::HasMemory() {
  if (memory_ == nullptr) return true;
  if (memory_place_ == 0 && !memory_->IsShort()) return true;
  return !waits_for_memory_ && MayRead(HeldPeers::Time());
}

// What it brings is not known once it is lost.
bool PayloadReceiver::MayRead(absl::Time now) {
  constexpr int64_t kAll = int64_t{1} << 40;
  const Http2Follower::Unfinished coming = follower_.unfinished();
  const ReceiveMemory::Wants wants = {.lacking = follower_.lost() ? kAll : coming.lacking,
                                      .begun = follower_.lost() ? kAll : coming.bytes,
                                      .finished = follower_.finished_bytes(),
                                      .address = peer_.address};
  return memory_->MayRead(memory_place_, wants, weak_from_this(), now);
}

ssize_t PayloadReceiver::WaitForMemory(msghdr& message) {
  if (IsAnothers()) return ReceiveUnfollowed(socket_, message, 0);
  const bool is_tcp = peer_.port > 0;
  if (!std::exchange(waits_for_memory_, true) && is_tcp) SetLeastToTell(socket_, kHeldBytes);
  char byte;
  const ssize_t there = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (there <= 0) return there;
  errno = EAGAIN;
  return -1;
}

bool PayloadReceiver::AskAgain(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  if (is_reset_ || IsAnothers()) {
    memory_->Leave(memory_place_);
    return false;
  }
  if (!MayRead(now) || !std::exchange(waits_for_memory_, false)) return true;
  if (peer_.port > 0) SetLeastToTell(socket_, 1);
  EventOrder::Get().TellAgain(socket_);
  return true;
}

PayloadReceiver::Ended PayloadReceiver::Reset() {
  absl::MutexLock lock(&mutex_);
  memory_->Leave(memory_place_);
  if (IsAnothers() || std::exchange(is_reset_, true)) return {socket_};
  shutdown(socket_, SHUT_RDWR);
  const Http2Follower::Unfinished had = follower_.unfinished();
  return {socket_, had.bytes - had.lacking};
}

ssize_t PayloadReceiver::ReceiveSome(msghdr& message) {
  const ssize_t got = ReceiveAndFollow(message);
  if (got > 0 && wasted_.has_value() && !is_tls_) Judge();
  return got;
}

void PayloadReceiver::Judge() {
  const absl::Time now = HeldPeers::Time();
  TakeHold(wasted_->EndRead(
      now, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return BytesAnswered(); },
      [&](double frames) { return held_peers_->Take(peer_.address, frames, now); }));
}

int64_t PayloadReceiver::BytesAnswered() const {
  if (is_tls_ && !answers_) return 0;
  return BytesSent(socket_) - handshake_bytes_;
}

ssize_t PayloadReceiver::ReceiveAndFollow(msghdr& message) {
  if (is_tls_ || follower_.lost()) {
    const ssize_t got = ReceiveUnfollowed(socket_, message, 0);
    if (got == 0) follower_.Lose();
    if (got <= 0 || !wasted_.has_value()) return got;
    if (is_tls_) {
      wasted_->FeedEncrypted(got);
    } else {
      ForEachPiece(message, 0, static_cast<size_t>(got), [&](const uint8_t* data, size_t size) {
        wasted_->Feed({data, size});
      });
    }
    return got;
  }
  const ssize_t got = ReceiveFollowed(message);
  const bool over = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (over) follower_.Lose();
  // Messages after the place where it lost its way are not known.
  if (got > 0 && follower_.lost()) ForgetFirstMessages(message, static_cast<size_t>(got));
  return got;
}

// Of an end nothing would tell a second time.
ssize_t PayloadReceiver::ReceiveHeld(msghdr& message) {
  char byte;
  const ssize_t there = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (there <= 0) return there;
  if (BytesThere(socket_) < until_bytes_) {
    errno = EAGAIN;
    return -1;
  }
  held_peers_->End(*std::exchange(hold_, absl::nullopt));
  const ssize_t got = ReceiveSome(message);
  if (!hold_.has_value()) SetLeastToTell(socket_, 1);  // after the read, or it would tell of that
  return got;
}

void PayloadReceiver::TakeHold(const WastedWork::Hold& hold) {
  if (hold.time == absl::ZeroDuration() || IsAnothers()) return;
  auto release = [receiver = weak_from_this()](HeldPeers::Key key) {
    if (auto held = receiver.lock()) held->Release(key);
  };
  hold_ = held_peers_->Hold(socket_, hold.time, std::move(release));
  until_bytes_ = hold.until_bytes;
  const int64_t least = std::min<int64_t>(until_bytes_, kHeldBytes);
  if (hold_.has_value()) SetLeastToTell(socket_, static_cast<int>(least));
}

// That hold may have ended before its time, and another have begun.
void PayloadReceiver::Release(HeldPeers::Key hold) {
  absl::MutexLock lock(&mutex_);
  if (hold_ != hold) return;
  hold_.reset();
  if (!IsAnothers()) SetLeastToTell(socket_, 1);
}

// As long as the socket has what was asked for: a read for each payload with a place, and beside
// them short ones, so that a payload whose place is not known yet is not read past it.
ssize_t PayloadReceiver::ReceiveFollowed(msghdr& message) {
  const size_t room = RoomOf(message), control = message.msg_controllen;
  size_t total = 0;
  for (bool between = follower_.placing() > 0; total < room;) {
    Read read;
    read.straight = follower_.Next();
    read.straight = read.straight.first(std::min(read.straight.size(), room - total));
    const bool is_short = between || !read.straight.empty();
    const size_t left = room - total - read.straight.size();
    read.rest = is_short ? std::min(left, kBetweenBytes) : left;
    const ssize_t got = Execute(read, socket_, total, control, message);
    if (got <= 0) return total > 0 ? static_cast<ssize_t>(total) : got;
    const size_t straight = std::min(read.straight.size(), static_cast<size_t>(got));
    if (straight > 0) follower_.Skip(static_cast<int64_t>(straight));
    if (wasted_.has_value()) wasted_->Skip(static_cast<int64_t>(straight));
    placed_bytes.fetch_add(static_cast<int64_t>(straight), std::memory_order_relaxed);
    ForEachPiece(message, total + straight, static_cast<size_t>(got) - straight,
                 [&](const uint8_t* data, size_t size) {
                   follower_.Feed({data, size});
                   if (wasted_.has_value()) wasted_->Feed({data, size});
                 });
    total += static_cast<size_t>(got);
    if (static_cast<size_t>(got) < read.bytes()) break;
    between = !read.straight.empty();  // after a short read that led to none, all that there is
  }
  EventOrder::Get().OnMoves(socket_, follower_.TakeLargest());
  return static_cast<ssize_t>(total);
}

std::unique_ptr<PayloadReceiver::Placing> PlaceMessagesFrom(const std::string& peer,
                                                            const void* first_message,
                                                            MessagePlacer& placer) {
  auto receiver = Table::Get().Find(Http2Follower::OwnerOf(first_message));
  if (receiver == nullptr || receiver->peer_.port != PortOf(peer)) return nullptr;
  return receiver->Place(first_message, placer);
}

size_t RoomOf(const msghdr& message) {
  size_t bytes = 0;
  for (size_t n = 0; n < message.msg_iovlen; ++n) bytes += message.msg_iov[n].iov_len;
  return bytes;
}

ssize_t ReceiveMessage(int socket, msghdr* message, int flags) {
  // gRPC asks once more, for nothing, when it has filled as many slices as it gives at a time and
  // has others; the 0 that it gets is not the connection's end.
  if (flags != 0 || RoomOf(*message) == 0) return SystemReceive(socket, message, flags);
  if (EventOrder::Get().HandOver(socket)) {
    errno = EAGAIN;
    return -1;
  }
  auto receiver = Table::Get().Find(socket);
  return receiver != nullptr ? receiver->Receive(*message) : ReceiveUnfollowed(socket, *message, 0);
}

}  // namespace attnd
