// PayloadReceiver: one gRPC connection whose large messages are read from the socket straight to
// where they are wanted, instead of into gRPC's buffers and from there.
//
// gRPC 1.51 reads a connection by recvmsg(2) into slices of its own and has no say in where a
// message lies. A program's own symbols come before those of its libraries, so a program can
// replace recvmsg (program_calls.cc): bytes that a placer wants elsewhere (http2_follower.h) go
// there, and gRPC is told that it has read as many. It looks at frames, lengths and prefixes, which
// it gets, and not at payloads, whose slices it delivers with meaningless bytes. That saves a copy
// of each byte and the caches that the slices would fill (docs/PERFORMANCE.md, Wire). In a program
// that does not, nothing is placed, and all is as without.
//
// A peer that makes the server work for nothing is not read for a while (held_peers.h): until then
// a read finds nothing, unless the connection has ended or as many bytes are there as end the hold,
// and SO_RCVLOWAT keeps the kernel from telling of fewer. Lowering it makes the kernel tell of what
// is there (tcp_set_rcvlowat), so that nothing is lost with edge-triggered events. Of TCP alone: a
// unix socket does not tell. What an encrypted connection brings is known once gRPC has decrypted
// it (program_tls_calls.cc), on its way to the next read.
//
// Nor is one whose messages lack more than there is memory for (receive_memory.h), over TCP, with
// TLS or by a unix socket, whose epoll set is asked again when it may be read.
//
// Threads: any. A placer is called by the thread that receives.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "base/held_peers.h"
#include "base/http2_follower.h"
#include "base/receive_memory.h"
#include "base/wasted_work.h"

namespace attnd {

class PayloadReceiver : public std::enable_shared_from_this<PayloadReceiver>,
                        public ReceiveMemory::Connection {
 public:
  // Follows a TCP or unix socket from its first byte on, until its number means another socket.
  // Null for a number that is too large. Without `held` and `memory` the peer is always read.
  static std::shared_ptr<PayloadReceiver> Attach(int socket, Http2Follower::Peer peer,
                                                 std::shared_ptr<HeldPeers> held = nullptr,
                                                 std::shared_ptr<ReceiveMemory> memory = nullptr);

  // While it lives the placer is asked; when it is gone nothing is written any more.
  class Placing {
   public:
    Placing(std::shared_ptr<PayloadReceiver> receiver, uint32_t stream)
        : receiver_(std::move(receiver)), stream_(stream) {}
    ~Placing();
    Placing(const Placing&) = delete;
    Placing& operator=(const Placing&) = delete;

   private:
    const std::shared_ptr<PayloadReceiver> receiver_;
    const uint32_t stream_;
  };

  // gRPC delivers shorter pieces as copies.
  static constexpr size_t kLeastFirstBytes = 32;
  // Of the stream whose first message gRPC has delivered from `first_message`, a slice of at least
  // so many bytes that the caller holds. Null when it is not found.
  std::unique_ptr<Placing> Place(const void* first_message, MessagePlacer& placer);

  // Of this process, read straight to their place so far.
  static int64_t PlacedBytes();

  // Whether that message came by this connection.
  bool Holds(const void* first_message) const {
    return Http2Follower::OwnerOf(first_message) == socket_;
  }

  // As recvmsg(2) from the socket without flags.
  ssize_t Receive(msghdr& message);

  // TLS that this thread begins while it lives is this connection's. Null: of none.
  class BeginningTls {
   public:
    explicit BeginningTls(std::shared_ptr<PayloadReceiver> receiver);
    ~BeginningTls();
    BeginningTls(const BeginningTls&) = delete;
    BeginningTls& operator=(const BeginningTls&) = delete;
  };
  // That connection, of which nothing has been read yet. Null: none.
  static std::shared_ptr<PayloadReceiver> BeginTls();
  // What gRPC has decrypted of what it read: nothing yet, perhaps. It reads several times, decrypts
  // all of that, and reads again.
  void Decrypted(absl::Span<const uint8_t> bytes);
  // It is about to send something that is not of the handshake.
  void BeginToAnswer() {
    if (!answers_) TakeHandshake();
  }

  PayloadReceiver(int socket, Http2Follower::Peer peer, std::shared_ptr<HeldPeers> held,
                  std::shared_ptr<ReceiveMemory> memory);

 private:
  friend std::unique_ptr<Placing> PlaceMessagesFrom(const std::string& peer,
                                                    const void* first_message,
                                                    MessagePlacer& placer);
  struct PeerName {
    int port = 0;          // as far as it had one when it was attached
    uint64_t address = 0;  // the first 64 bits of IPv6's, which one peer has for itself; 0: none
  };
  static PeerName PeerOf(int socket);

  void Begin();
  void TakeHandshake();
  bool IsAnothers() const;
  void Judge() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t BytesAnswered() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ssize_t ReceiveSome(msghdr& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ssize_t ReceiveAndFollow(msghdr& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ssize_t ReceiveFollowed(msghdr& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ssize_t ReceiveHeld(msghdr& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeHold(const WastedWork::Hold& hold) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(HeldPeers::Key hold);
  bool HasMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ssize_t WaitForMemory(msghdr& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AskAgain(absl::Time now) override;
  Ended Reset() override;
  bool MayRead(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int socket_;
  const uint64_t cookie_;  // of the socket: its number may be given to another
  const PeerName peer_;
  // The server's, which a connection may outlive.
  const std::shared_ptr<HeldPeers> held_peers_;
  const std::shared_ptr<ReceiveMemory> memory_;
  absl::Mutex mutex_;
  Http2Follower follower_ ABSL_GUARDED_BY(mutex_);
  absl::optional<WastedWork> wasted_ ABSL_GUARDED_BY(mutex_);
  absl::optional<HeldPeers::Key> hold_ ABSL_GUARDED_BY(mutex_);
  int64_t until_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // that end it
  int64_t memory_place_ ABSL_GUARDED_BY(mutex_) = 0;
  bool waits_for_memory_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_reset_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_tls_ ABSL_GUARDED_BY(mutex_) = false;
  bool to_judge_ ABSL_GUARDED_BY(mutex_) = false;        // what it has read, once it is decrypted
  std::atomic<bool> answers_{false};                     // beyond the handshake
  int64_t handshake_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // that were sent for it
};

// The same among all connections, of a call from `peer`, which is gRPC's name for it. The message
// lies in the memory that a recvmsg filled, or the connection is encrypted and no other of that
// port is not.
std::unique_ptr<PayloadReceiver::Placing> PlaceMessagesFrom(const std::string& peer,
                                                            const void* first_message,
                                                            MessagePlacer& placer);

// Bytes of the message's pieces.
size_t RoomOf(const msghdr& message);

// What a program's recvmsg(2) does.
ssize_t ReceiveMessage(int socket, msghdr* message, int flags);

}  // namespace attnd
